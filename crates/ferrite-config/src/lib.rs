//! The table of all settings of Ferrite's programs.
//!
//! A setting is written once, in [`table`]. Everything else is derived from it: the keys of
//! `ferrite.toml`, the module's arguments and CONFIG names, the flags and environment variables of
//! the commands, `ferrite config`, the JSON schema, and the reference page of the book.
//!
//! ```text
//!   table ──► Setting ──► parse ──► Values (each value with its origin) ──► the programs
//!                │                     ▲
//!                ├──► file ────────────┤ ferrite.toml, all errors with their lines
//!                ├──► arguments, flags ┤
//!                ├──► environment ─────┘
//!                └──► schema, reference page
//! ```
//!
//! This crate imports no other crate of Ferrite, so that every program can use it. It knows what a
//! value looks like, not what it does.
#![forbid(unsafe_code)]

pub mod address;
mod build;
pub mod environment;
pub mod exit_code;
#[cfg(feature = "file")]
pub mod file;
mod kind;
mod lookup;
#[cfg(feature = "manuals")]
pub mod manuals;
mod nearest;
mod number;
pub mod peer;
pub mod ports;
pub mod reference;
#[cfg(feature = "file")]
pub mod schema;
mod setting;
pub mod size;
pub mod table;
pub mod time;
pub mod transports;
pub mod unit;
mod value;
mod values;

pub use build::Build;
pub use kind::Kind;
pub use lookup::find;
pub use nearest::nearest;
pub use number::number;
pub use setting::{Alias, AliasForm, Program, Setting, TakesEffect};
pub use value::Value;
pub use values::{Contradiction, Entry, Origin, Policy, Values};
