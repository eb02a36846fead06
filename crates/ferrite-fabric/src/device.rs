//! One device: its verbs objects, the state that links share, and the requests in flight on it.
//!
//! | file | what it is |
//! |---|---|
//! | `slots.rs` | requests in flight, which own their memory (`unsafe`) |
//! | `shared_device.rs` | the part of a device that links use |
//! | `device_choice.rs` | which port and GID links may use |
//! | `device_objects.rs` | the verbs objects that all links of a device share |
//! | `queue_pairs.rs` | which queue pair belongs to which link |

pub(crate) mod device_choice;
pub(crate) mod device_objects;
pub(crate) mod queue_pairs;
pub(crate) mod shared_device;
pub(crate) mod slots;
