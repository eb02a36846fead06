//! One word to the linker: the library is never unloaded. An engine closes a module that it has
//! refused, and a thread of ours, or what a thread left to be done at its end, must not find its
//! code gone.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
