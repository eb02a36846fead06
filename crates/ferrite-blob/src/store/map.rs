//! The map of a download: which chunks are in the data file, and their checksums. This file has the
//! layout of the `.map` file, without I/O. All numbers are little-endian.
//!
//! ```text
//!   0     8   magic "FERRBMAP"
//!   8     4   version (1)
//!   12    4   bytes of a chunk
//!   16    8   bytes of the blob
//!   24    4   CRC32C of the bytes 0 to 23
//!   28        zeros
//!   4096      bitmap: bit n % 8 of byte n / 8 is set if chunk n is present; padded to 4 bytes
//!             CRC32C of each chunk, 4 bytes each
//! ```
//!
//! The header has a page of its own, because a disk may damage a whole sector when the power fails
//! during a write. The header is never written again, so it is safe once it was synced. Bitmap and
//! checksums need no such care: a chunk is used only if it has its checksum.

const MAGIC: &[u8; 8] = b"FERRBMAP";
const VERSION: u32 = 1;
const BITMAP_AT: u64 = 4096;
/// The part of the header that is not zeros.
pub(super) const HEADER_BYTES: usize = 28;

/// The size of a blob and of its chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    size: u64,
    chunk_bytes: u32,
    chunks: u32,
}

impl Shape {
    /// Returns `None` if the chunks could not be numbered, or there are none of this size.
    pub(super) fn new(size: u64, chunk_bytes: u32) -> Option<Self> {
        if chunk_bytes == 0 || i64::try_from(size).is_err() {
            return None;
        }
        let chunks = u32::try_from(size.div_ceil(u64::from(chunk_bytes))).ok()?;
        Some(Self { size, chunk_bytes, chunks })
    }

    /// Reads a header. Returns `None` if it is damaged or of another version.
    pub(super) fn from_header(header: &[u8; HEADER_BYTES]) -> Option<Self> {
        let (fields, sum) = header.split_at(24);
        let is_known = fields.starts_with(MAGIC) && fields[8..12] == VERSION.to_le_bytes();
        if !is_known || *sum != crc32c::crc32c(fields).to_le_bytes() {
            return None;
        }
        let chunk_bytes = u32::from_le_bytes(fields[12..16].try_into().ok()?);
        Self::new(u64::from_le_bytes(fields[16..24].try_into().ok()?), chunk_bytes)
    }

    pub(super) fn header(&self) -> [u8; HEADER_BYTES] {
        let mut header = [0; HEADER_BYTES];
        header[..8].copy_from_slice(MAGIC);
        header[8..12].copy_from_slice(&VERSION.to_le_bytes());
        header[12..16].copy_from_slice(&self.chunk_bytes.to_le_bytes());
        header[16..24].copy_from_slice(&self.size.to_le_bytes());
        let sum = crc32c::crc32c(&header[..24]);
        header[24..].copy_from_slice(&sum.to_le_bytes());
        header
    }

    /// The size of the blob.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    pub(super) fn chunks(&self) -> u32 {
        self.chunks
    }

    /// Returns where a chunk begins in the blob.
    pub(super) fn offset(&self, chunk: u32) -> u64 {
        u64::from(chunk) * u64::from(self.chunk_bytes)
    }

    /// Returns the size of a chunk. The last one may be shorter.
    pub(super) fn chunk_len(&self, chunk: u32) -> usize {
        let rest = self.size.saturating_sub(self.offset(chunk));
        rest.min(u64::from(self.chunk_bytes)) as usize
    }

    fn bitmap_bytes(&self) -> u64 {
        u64::from(self.chunks.div_ceil(32)) * 4
    }

    /// Returns the size of the map file.
    pub(super) fn map_bytes(&self) -> u64 {
        self.sum_at(self.chunks)
    }

    /// Returns the place of a chunk's checksum in the map file.
    pub(super) fn sum_at(&self, chunk: u32) -> u64 {
        BITMAP_AT + self.bitmap_bytes() + u64::from(chunk) * 4
    }

    /// Returns the place of the byte with a chunk's bit in the map file.
    pub(super) fn bit_at(&self, chunk: u32) -> u64 {
        BITMAP_AT + u64::from(chunk / 8)
    }
}

/// Which chunks are present, and the checksums of these.
#[derive(Debug)]
pub(super) struct ChunkMap {
    bits: Vec<u8>,
    sums: Vec<u32>,
    present: u32,
}

impl ChunkMap {
    /// Returns a map without chunks. Its memory is a 500,000th of the blob's size, for chunks of 2
    /// MiB.
    pub(super) fn new(shape: &Shape) -> Self {
        let chunks = shape.chunks() as usize;
        Self { bits: vec![0; chunks.div_ceil(8)], sums: vec![0; chunks], present: 0 }
    }

    /// Reads what follows the header's page in the map file.
    pub(super) fn from_bytes(shape: &Shape, bytes: &[u8]) -> Self {
        let mut map = Self::new(shape);
        let (bitmap, sums) =
            bytes.split_at_checked(shape.bitmap_bytes() as usize).unwrap_or_default();
        let sums = sums.as_chunks::<4>().0;
        for (chunk, sum) in (0..shape.chunks()).zip(sums) {
            if bitmap[chunk as usize / 8] & 1 << (chunk % 8) != 0 {
                map.insert(chunk, u32::from_le_bytes(*sum));
            }
        }
        map
    }

    /// Returns the bytes to read for [`ChunkMap::from_bytes`]: their place and number.
    pub(super) fn place(shape: &Shape) -> (u64, u64) {
        (BITMAP_AT, shape.map_bytes() - BITMAP_AT)
    }

    /// Returns the checksum of a chunk, or `None` if the chunk is missing.
    pub(super) fn sum(&self, chunk: u32) -> Option<u32> {
        let at = chunk as usize;
        let is_set = self.bits.get(at / 8)? & 1 << (at % 8) != 0;
        if is_set { self.sums.get(at).copied() } else { None }
    }

    /// Returns the byte with the bit of this chunk.
    pub(super) fn bit_byte(&self, chunk: u32) -> u8 {
        self.bits.get(chunk as usize / 8).copied().unwrap_or(0)
    }

    /// Marks a chunk as present. Ignores a chunk that the blob does not have.
    pub(super) fn insert(&mut self, chunk: u32, sum: u32) {
        let at = chunk as usize;
        if let Some(place) = self.sums.get_mut(at) {
            *place = sum;
            let bit = 1 << (at % 8);
            self.present += u32::from(self.bits[at / 8] & bit == 0);
            self.bits[at / 8] |= bit;
        }
    }

    /// Marks a chunk as missing.
    pub(super) fn remove(&mut self, chunk: u32) {
        if self.sum(chunk).is_some() {
            self.bits[chunk as usize / 8] &= !(1 << (chunk % 8));
            self.present -= 1;
        }
    }

    /// Returns the number of chunks that are present.
    pub(super) fn present(&self) -> u32 {
        self.present
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_has_the_documented_bytes() {
        let header = Shape::new(5_000_000, 2 << 20).expect("a shape").header();
        let expected =
            [70, 69, 82, 82, 66, 77, 65, 80, 1, 0, 0, 0, 0, 0, 32, 0, 64, 75, 76, 0, 0, 0, 0, 0];
        assert_eq!(header[..24], expected);
        assert_eq!(header[24..], crc32c::crc32c(&expected).to_le_bytes());
    }

    #[test]
    fn accepts_no_header_with_a_changed_bit() {
        let shape = Shape::new(5_000_000, 2 << 20).expect("a shape");
        let header = shape.header();
        assert_eq!(Shape::from_header(&header), Some(shape));
        for bit in 0..HEADER_BYTES * 8 {
            let mut changed = header;
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Shape::from_header(&changed), None, "bit {bit}");
        }
    }

    #[test]
    fn accepts_no_size_whose_chunks_have_no_number() {
        for size in [u64::MAX, 1 << 63, (1 << 32) * 4 + 1] {
            assert_eq!(Shape::new(size, 4), None, "{size}");
        }
        assert_eq!(Shape::new(1, 0), None);
        let largest = Shape::new(u64::from(u32::MAX) * 4, 4).expect("a shape");
        assert_eq!(largest.chunks(), u32::MAX);
        assert_eq!(largest.map_bytes(), 4096 + (1 << 29) + 4 * u64::from(u32::MAX));
    }

    #[test]
    fn places_of_bits_and_checksums_do_not_overlap() {
        for chunks in [1, 7, 8, 9, 31, 32, 33, 100] {
            let shape = Shape::new(chunks * 16, 16).expect("a shape");
            assert!(shape.bit_at(shape.chunks() - 1) < shape.sum_at(0));
            assert_eq!(shape.map_bytes(), shape.sum_at(0) + 4 * chunks);
            assert_eq!(shape.sum_at(0) % 4, 0);
            assert!(shape.bit_at(0) >= 4096, "in the page of the header");
        }
    }

    #[test]
    fn reads_what_it_wrote() {
        let shape = Shape::new(100, 10).expect("a shape");
        let mut map = ChunkMap::new(&shape);
        for chunk in [0, 3, 9, 10, u32::MAX] {
            map.insert(chunk, chunk ^ 77);
        }
        assert_eq!(map.present(), 3);
        let mut bytes = vec![0; ChunkMap::place(&shape).1 as usize];
        for chunk in 0..10 {
            bytes[(shape.bit_at(chunk) - BITMAP_AT) as usize] = map.bit_byte(chunk);
            let at = (shape.sum_at(chunk) - BITMAP_AT) as usize;
            bytes[at..at + 4].copy_from_slice(&map.sum(chunk).unwrap_or(0).to_le_bytes());
        }
        let mut read = ChunkMap::from_bytes(&shape, &bytes);
        assert_eq!((0..11).filter_map(|chunk| read.sum(chunk)).collect::<Vec<_>>(), [77, 78, 68]);
        read.remove(3);
        read.remove(3);
        read.remove(10);
        assert_eq!((read.present(), read.sum(3)), (2, None));
    }

    #[test]
    fn reads_any_bytes_without_panic() {
        let shape = Shape::new(100, 10).expect("a shape");
        for len in 0..60 {
            assert!(ChunkMap::from_bytes(&shape, &vec![0xff; len]).present() <= 10);
        }
    }
}
