//! Loads libibverbs and librdmacm with dlopen, instead of linking them.
//!
//! One binary serves every host. Where rdma-core is absent, the program still starts, and a request
//! for RDMA returns an [`Absence`] that says what to install. The libraries are opened once and
//! never closed, because their threads and providers do not survive an unload.

use std::ffi::CStr;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use crate::error::Absence;
#[cfg(feature = "fake")]
use crate::fake::{self, World};
use crate::sys::{CmFunctions, IbvFunctions};

pub(crate) const LIBIBVERBS: &str = "libibverbs.so.1";
const LIBRDMACM: &str = "librdmacm.so.1";

/// An RDMA stack: the entry point of this crate.
///
/// [`Verbs::system`] returns the stack of this host. Cloning is cheap.
#[derive(Clone)]
pub struct Verbs {
    pub(crate) ibv: &'static IbvFunctions,
    cm: Result<&'static CmFunctions, Absence>,
    #[cfg(feature = "fake")]
    world: Option<World>,
}

impl Verbs {
    /// Loads libibverbs, and librdmacm where it is present, once per process.
    ///
    /// # Errors
    /// [`Absence::NoLibrary`] or [`Absence::OldLibrary`] if libibverbs is missing or too old. If
    /// librdmacm is missing or too old, only [`Verbs::open_event_channel`] reports it.
    pub fn system() -> Result<Self, Absence> {
        static SYSTEM: OnceLock<Result<Verbs, Absence>> = OnceLock::new();
        SYSTEM.get_or_init(load_system).clone()
    }

    /// Returns the functions of RDMA CM.
    pub(crate) fn cm(&self) -> Result<&'static CmFunctions, Absence> {
        self.cm.clone()
    }

    /// Runs a C call that takes no object, for example to list the devices or to open the CM. With
    /// the fake provider, the call runs in the `World` that this `Verbs` belongs to.
    pub(crate) fn call_global<T>(&self, call: impl FnOnce() -> T) -> T {
        #[cfg(feature = "fake")]
        if let Some(world) = &self.world {
            return world.enter(call);
        }
        call()
    }
}

#[cfg(feature = "fake")]
impl World {
    /// Returns the entry point for the code under test.
    #[must_use]
    pub fn verbs(&self) -> Verbs {
        Verbs { ibv: &fake::IBV, cm: Ok(&fake::CM), world: Some(self.clone()) }
    }
}

impl std::fmt::Debug for Verbs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Verbs").field("cm", &self.cm.as_ref().map(|_| ())).finish_non_exhaustive()
    }
}

fn load_system() -> Result<Verbs, Absence> {
    let library = open(LIBIBVERBS)?;
    // SAFETY: the soname names libibverbs with a stable ABI, and `leak` keeps it loaded for ever.
    let ibv = unsafe { IbvFunctions::load(leak(library)) }
        .map_err(|symbol| Absence::OldLibrary { library: LIBIBVERBS, symbol })?;
    let cm = open(LIBRDMACM).and_then(|library| {
        // SAFETY: as above, for librdmacm.
        unsafe { CmFunctions::load(leak(library)) }
            .map_err(|symbol| Absence::OldLibrary { library: LIBRDMACM, symbol })
    });
    Ok(Verbs {
        ibv: Box::leak(Box::new(ibv)),
        cm: cm.map(|cm| &*Box::leak(Box::new(cm))),
        #[cfg(feature = "fake")]
        world: None,
    })
}

fn open(name: &'static str) -> Result<Library, Absence> {
    // RTLD_GLOBAL, because libibverbs loads providers as plugins, which resolve its symbols.
    // SAFETY: the initialisers of rdma-core have no preconditions.
    unsafe { Library::open(Some(name), RTLD_NOW | RTLD_GLOBAL) }
        .map_err(|error| Absence::NoLibrary { library: name, detail: loader_text(&error) })
}

/// Returns the dynamic loader's message, which libloading keeps as the source of its error.
fn loader_text(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

fn leak(library: Library) -> &'static Library {
    Box::leak(Box::new(library))
}

/// Copies a C string that the library owns; a null pointer gives an empty string.
///
/// # Safety
/// `text` is null or points to a terminated string that lives through the call.
pub(crate) unsafe fn text(text: *const std::ffi::c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller guarantees a terminated string that lives through the call.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_library_is_reported_with_its_remedy() {
        let Err(absence) = open("libferrite-nowhere.so.1") else {
            panic!("this library must not exist")
        };
        assert!(matches!(absence, Absence::NoLibrary { library: "libferrite-nowhere.so.1", .. }));
        assert!(absence.to_string().contains("libferrite-nowhere.so.1: cannot open"), "{absence}");
        assert!(absence.remedy().contains("libibverbs1"), "{}", absence.remedy());
    }

    #[test]
    fn library_without_a_required_symbol_is_rejected() {
        let library = open("libc.so.6").expect("the C library");
        // SAFETY: no symbol is found, so none is called.
        let loaded = unsafe { IbvFunctions::load(&library) };
        assert_eq!(loaded.err(), Some("ibv_get_device_list"));
    }
}
