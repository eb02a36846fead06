//! Marks the library as never unloaded. An engine calls `dlclose` on a module that failed to load.
//! The module's threads and their thread-exit destructors may still run after that, and need their
//! code to stay mapped.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
