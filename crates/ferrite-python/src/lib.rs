//! The native part of the Python package `ferrite`: a stream to a Redis or Valkey server, with the
//! methods of a Python socket.
//!
//! redis-py still packs commands, parses replies, and handles AUTH, HELLO, pub/sub and retries. It
//! reads and writes through `stream::Stream`, over RDMA or TCP. The package's Python part
//! (`python/ferrite`) has the connection classes.
//!
//! | file | part |
//! |---|---|
//! | `stream.rs` | the class `Stream` |
//! | `input.rs` | the bytes received and not yet taken, and bulk replies read into a buffer |
//! | `buffer.rs` | the memory of Python objects as slices: all `unsafe` is there |
//! | `background.rs` | the thread that drives the fabric |
#![deny(unsafe_code)]

mod background;
mod buffer;
mod input;
mod stream;

use pyo3::prelude::*;

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<stream::Stream>()?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))
}
