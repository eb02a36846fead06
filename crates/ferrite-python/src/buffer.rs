//! The memory of Python objects as slices, without a copy.
//!
//! This is a file of its own, because it has the crate's only unsafe code. Python's buffer protocol
//! pins the memory while a buffer is held, but does not lock it. If a program uses the same object
//! in another thread during the call, the bytes of both are mixed. Python's own `socket.recv_into`
//! behaves in the same way.
#![expect(unsafe_code, reason = "slices of memory that Python owns")]

use std::slice;

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::prelude::*;

/// The bytes of an object, for reading.
pub(crate) struct Source(PyUntypedBuffer);

/// The bytes of an object, for writing.
pub(crate) struct Target(PyUntypedBuffer);

impl Source {
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        contiguous(object).map(Self)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        let (start, len) = memory(&self.0);
        if len == 0 {
            return &[];
        }
        // SAFETY: the buffer is contiguous (checked by `of`), so that `len` bytes follow `start`.
        // Python keeps these bytes allocated and in place while `self.0` is held, and the result
        // borrows `self.0`. Foreign code allocated the bytes, so they count as initialised. The
        // Python program must not write to them during the call (see the top of this file).
        unsafe { slice::from_raw_parts(start, len) }
    }
}

impl Target {
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let buffer = contiguous(object)?;
        match buffer.readonly() {
            true => Err(PyBufferError::new_err("the buffer is read-only")),
            false => Ok(Self(buffer)),
        }
    }

    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        let (start, len) = memory(&self.0);
        if len == 0 {
            return &mut [];
        }
        // SAFETY: as in `Source::bytes`; in addition, the buffer is writable (checked by `of`), and
        // `&mut self` makes this the only slice of it in this crate.
        unsafe { slice::from_raw_parts_mut(start, len) }
    }
}

fn contiguous(object: &Bound<'_, PyAny>) -> PyResult<PyUntypedBuffer> {
    let buffer = PyUntypedBuffer::get(object)?;
    match buffer.is_c_contiguous() {
        true => Ok(buffer),
        false => Err(PyValueError::new_err(
            "the buffer is not contiguous in C order; pass a contiguous copy \
             (numpy.ascontiguousarray)",
        )),
    }
}

fn memory(buffer: &PyUntypedBuffer) -> (*mut u8, usize) {
    (buffer.buf_ptr().cast(), buffer.len_bytes())
}
