//! Protection domains and memory regions: the checks of keys, and the copying of data.
//!
//! Only this module accesses the memory that callers register or send inline. It copies registered
//! memory byte by byte with relaxed atomics, because another thread may use the memory at the same
//! time, as with a real device. Without atomics, Rust (and Miri) would call this a data race.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::io::Errno;

use super::enter::enter;
use super::object::{self, Id, Object, code, extended, pointer};
use super::records::{
    Domain, KEY_TAG, LOCAL_TAG, LOCAL_WRITE, Piece, REMOTE_READ, REMOTE_TAG, REMOTE_WRITE, Region,
    Span,
};
use super::state::State;
use crate::sys;

/// Flags that the fake models or may ignore (IBV_ACCESS_OPTIONAL_RANGE).
const KNOWN_ACCESS: u32 = 0xff | 0x3ff0_0000;

impl State {
    /// Returns the first `len` bytes of `pieces`; `None` if a key is not a local key of `domain`,
    /// does not allow `access`, or does not cover its piece.
    pub(super) fn local_spans(
        &self,
        domain: Id,
        pieces: &[Piece],
        mut len: u64,
        access: u32,
    ) -> Option<Vec<Span>> {
        let mut spans = Vec::with_capacity(pieces.len());
        for piece in pieces {
            let part = u64::from(piece.len).min(len);
            len -= part;
            if part > 0 {
                spans.push(self.span(domain, LOCAL_TAG, piece.lkey, piece.addr, part, access)?);
            }
        }
        Some(spans)
    }

    /// Returns `len` bytes that the peer of `qp` named; `None` if `rkey` is not valid on `qp`, does
    /// not allow `access`, or does not cover the bytes.
    pub(super) fn remote_span(
        &self,
        qp: Id,
        rkey: u32,
        addr: u64,
        len: u64,
        access: u32,
    ) -> Option<Span> {
        if len == 0 {
            return Some(Span { at: 0, len: 0 });
        }
        if let Some(window) = self.window_with_key(rkey) {
            let region = self.regions.get(&window.allows(qp, rkey, addr, len, access)?)?;
            return region.part(addr, len);
        }
        self.span(self.queue_pairs.get(&qp)?.domain, REMOTE_TAG, rkey, addr, len, access)
    }

    fn span(
        &self,
        domain: Id,
        tag: u32,
        key: u32,
        addr: u64,
        len: u64,
        access: u32,
    ) -> Option<Span> {
        let region = self.regions.get(self.keys.get(&(key >> 8))?)?;
        let allowed =
            region.domain == domain && key & KEY_TAG == tag && region.access & access == access;
        allowed.then(|| region.part(addr, len)).flatten()
    }

    fn register(
        &mut self,
        domain: Id,
        at: *mut c_void,
        len: usize,
        iova: u64,
        access: u32,
    ) -> Result<*mut sys::ibv_mr, Errno> {
        let found = self.domains.get(&domain).ok_or(Errno::INVAL)?;
        let (raw_pd, context) = (found.raw, found.context);
        let raw_context = self.usable(context)?.raw.context();
        let spec = &self.device_of(context)?.spec;
        let (max_bytes, max_mr) = (spec.max_mr_bytes, spec.max_mr as usize);
        // As in the kernel, remote write access requires local write access.
        let remote_only = access & REMOTE_WRITE != 0 && access & LOCAL_WRITE == 0;
        if len == 0 || len as u64 > max_bytes || remote_only || access & !KNOWN_ACCESS != 0 {
            return Err(Errno::INVAL);
        }
        if self.regions.len() >= max_mr {
            return Err(Errno::NOMEM);
        }
        let id = self.new_id();
        // A key has room for an id of 24 bits, which is enough for a test.
        let index = u32::try_from(id).ok().filter(|index| index >> 24 == 0).ok_or(Errno::NOMEM)?;
        let is_remote = access & (REMOTE_READ | REMOTE_WRITE) != 0;
        let raw = sys::ibv_mr {
            context: raw_context,
            pd: raw_pd.0,
            addr: at,
            length: len,
            handle: index,
            lkey: index << 8 | LOCAL_TAG,
            rkey: if is_remote { index << 8 | REMOTE_TAG } else { 0 },
        };
        let raw = Object::for_caller(raw, id, self.world()?);
        let at = at.expose_provenance();
        self.regions.insert(id, Region { domain, at, iova, len: len as u64, access, index, raw });
        self.keys.insert(index, id);
        Ok(raw.0)
    }

    fn domain_is_used(&self, domain: Id) -> bool {
        self.regions.values().any(|region| region.domain == domain)
            || self.windows.values().any(|window| window.domain == domain)
            || self.srqs.values().any(|srq| srq.domain == domain)
            || self.queue_pairs.values().any(|qp| qp.domain == domain)
    }
}

/// Copies bytes between spans that have been checked. The shorter side determines how many.
pub(super) fn copy(from: &[Span], to: &[Span]) {
    let (mut from, mut to) = (from.iter().copied(), to.iter().copied());
    let empty = Span { at: 0, len: 0 };
    let (mut source, mut target) = (empty, empty);
    loop {
        while source.len == 0 {
            let Some(next) = from.next() else { return };
            source = next;
        }
        while target.len == 0 {
            let Some(next) = to.next() else { return };
            target = next;
        }
        let len = source.len.min(target.len);
        copy_bytes(source.at, target.at, len);
        for span in [&mut source, &mut target] {
            *span = Span { at: span.at + len, len: span.len - len };
        }
    }
}

fn copy_bytes(from: usize, to: usize, len: usize) {
    let from: *mut u8 = std::ptr::with_exposed_provenance_mut(from);
    let to: *mut u8 = std::ptr::with_exposed_provenance_mut(to);
    for at in 0..len {
        // SAFETY: each range is in a registered region or in bytes of our own, because a `Span` is
        // created from one of them under the same lock. The owner of a region guarantees that its
        // memory is valid until the region is deregistered, which takes the same lock. Others may
        // access the memory at the same time, so this uses atomics.
        unsafe {
            let byte = AtomicU8::from_ptr(from.add(at)).load(Ordering::Relaxed);
            AtomicU8::from_ptr(to.add(at)).store(byte, Ordering::Relaxed);
        }
    }
}

/// Copies inline data out of the caller's memory. Inline data needs no key.
///
/// # Safety
/// The pieces name memory that is valid for reads.
pub(super) unsafe fn read_inline(pieces: &[Piece]) -> Vec<AtomicU8> {
    let mut bytes = Vec::new();
    for piece in pieces {
        let from: *const u8 = std::ptr::with_exposed_provenance(piece.addr as usize);
        // SAFETY: the caller guarantees that the memory is valid for reads. The read is not atomic,
        // because `AtomicU8` needs writable memory.
        let read = |at| unsafe { from.add(at).read_volatile() };
        bytes.extend((0..piece.len as usize).map(read).map(AtomicU8::new));
    }
    bytes
}

pub(super) unsafe extern "C" fn alloc_pd(context: *mut sys::ibv_context) -> *mut sys::ibv_pd {
    // SAFETY: the caller's context is open.
    pointer(unsafe {
        enter("ibv_alloc_pd", extended(context), |state, context| {
            let raw_context = state.usable(context)?.raw.context();
            if state.domains.len() >= state.device_of(context)?.spec.max_pd as usize {
                return Err(Errno::NOMEM);
            }
            let id = state.new_id();
            let raw = sys::ibv_pd { context: raw_context, handle: 0 };
            let raw = Object::for_caller(raw, id, state.world()?);
            state.domains.insert(id, Domain { context, raw });
            Ok(raw.0)
        })
    })
}

pub(super) unsafe extern "C" fn dealloc_pd(pd: *mut sys::ibv_pd) -> c_int {
    // SAFETY: the caller's domain is alive until here, and not used after.
    code(unsafe {
        enter("ibv_dealloc_pd", pd, |state, id| {
            if state.domain_is_used(id) {
                return Err(Errno::BUSY);
            }
            object::free(state.domains.remove(&id).ok_or(state.no_object())?.raw);
            Ok(())
        })
    })
}

pub(super) unsafe extern "C" fn reg_mr(
    pd: *mut sys::ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut sys::ibv_mr {
    // SAFETY: the caller's domain is alive.
    pointer(unsafe {
        enter("ibv_reg_mr", pd, |state, domain| {
            state.register(domain, addr, length, addr.addr() as u64, access.cast_unsigned())
        })
    })
}

pub(super) unsafe extern "C" fn reg_mr_iova2(
    pd: *mut sys::ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut sys::ibv_mr {
    // This uses the name of `reg_mr`, so that injected faults apply to both calls.
    // SAFETY: the caller's domain is alive.
    pointer(unsafe {
        enter("ibv_reg_mr", pd, |state, domain| state.register(domain, addr, length, iova, access))
    })
}

pub(super) unsafe extern "C" fn dereg_mr(mr: *mut sys::ibv_mr) -> c_int {
    // SAFETY: the caller's region is alive until here, and not used after.
    code(unsafe {
        enter("ibv_dereg_mr", mr, |state, id| {
            // As in Soft-RoCE, a region cannot be deregistered while a window is bound to it.
            if state.windows.values().any(|window| window.is_bound_to_region(id)) {
                return Err(Errno::INVAL);
            }
            let region = state.regions.remove(&id).ok_or(state.no_object())?;
            state.keys.remove(&region.index);
            object::free(region.raw);
            Ok(())
        })
    })
}
