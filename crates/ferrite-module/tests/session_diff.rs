//! The parts of `host_session_diff`.

mod commands;
mod compare;
mod differences;
mod flood;
mod generate;
pub(crate) mod hunt;
mod idle;
mod run;
mod session;
mod side;
mod vocabulary;
mod waiting;
