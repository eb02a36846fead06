//! Output of the module: replies to its commands, and its sections of INFO.
#![expect(
    unsafe_code,
    reason = "calls by function pointers, with pointers that the engine gave us"
)]

use std::ffi::{CStr, c_int, c_long};
use std::marker::PhantomData;
use std::ptr;

use super::table::RawInfo;
use super::{Context, OK, api, c_string};

/// A reply to a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reply {
    Error(String),
    Simple(String),
    /// A simple string, after which the engine disconnects the client with this id.
    SimpleAndClose(String, u64),
    Text(String),
    Lines(Vec<String>),
    Map(Vec<(String, Value)>),
    /// A list of maps.
    Maps(Vec<Vec<(String, Value)>>),
    WrongArity,
}

/// A value in INFO or in a reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Value {
    Number(u64),
    Text(String),
}

/// The output of INFO.
pub(crate) struct Info<'a>(ptr::NonNull<RawInfo>, PhantomData<&'a ()>);

impl Info<'_> {
    /// Wraps the output; `None` if it is null.
    ///
    /// # Safety
    /// The engine passed `raw` to its INFO callback, which outlives the result, or `raw` is null.
    pub(crate) unsafe fn new(raw: *mut RawInfo) -> Option<Self> {
        ptr::NonNull::new(raw).map(|raw| Self(raw, PhantomData))
    }

    /// Writes a section. The engine prefixes the names of the section and of its fields with the
    /// module's name. It skips sections that were not requested.
    pub(crate) fn section(&self, name: &CStr, fields: &[(String, Value)]) {
        // SAFETY: the engine copies the strings.
        unsafe {
            if (api().info_add_section)(self.0.as_ptr(), name.as_ptr()) != OK {
                return;
            }
            for (name, value) in fields {
                let name = c_string(name);
                match value {
                    Value::Number(number) => {
                        (api().info_add_number)(self.0.as_ptr(), name.as_ptr(), *number)
                    }
                    Value::Text(text) => (api().info_add_text)(
                        self.0.as_ptr(),
                        name.as_ptr(),
                        c_string(text).as_ptr(),
                    ),
                };
            }
        }
    }
}

impl Context<'_> {
    /// Replies to the command that runs.
    pub(crate) fn reply(self, reply: &Reply) {
        let api = api();
        // SAFETY: the context is that of a command; strings end with a zero or come with their
        // length, and the engine copies them.
        unsafe {
            match reply {
                Reply::Error(text) => (api.reply_with_error)(self.raw(), c_string(text).as_ptr()),
                Reply::Simple(text) => {
                    (api.reply_with_simple_string)(self.raw(), c_string(text).as_ptr())
                }
                Reply::SimpleAndClose(text, client) => {
                    let answer =
                        (api.reply_with_simple_string)(self.raw(), c_string(text).as_ptr());
                    // A client that closes itself still gets its replies. If the client is already
                    // gone, this fails, which does not matter.
                    let _ = (api.close_client)(self.raw(), *client);
                    answer
                }
                Reply::Text(text) => {
                    (api.reply_with_verbatim_string)(self.raw(), text.as_ptr().cast(), text.len())
                }
                Reply::Lines(lines) => {
                    let answer = (api.reply_with_array)(self.raw(), lines.len() as c_long);
                    for line in lines {
                        (api.reply_with_simple_string)(self.raw(), c_string(line).as_ptr());
                    }
                    answer
                }
                Reply::Map(fields) => self.reply_map(fields),
                Reply::Maps(maps) => {
                    let answer = (api.reply_with_array)(self.raw(), maps.len() as c_long);
                    for fields in maps {
                        self.reply_map(fields);
                    }
                    answer
                }
                Reply::WrongArity => (api.wrong_arity)(self.raw()),
            };
        }
    }
    /// Replies with a map. It may be an element of an array that was begun before.
    fn reply_map(self, fields: &[(String, Value)]) -> c_int {
        let api = api();
        // SAFETY: the context is that of a command; strings come with their length, and the engine
        // copies them.
        unsafe {
            let answer = (api.reply_with_map)(self.raw(), fields.len() as c_long);
            for (name, value) in fields {
                (api.reply_with_string_buffer)(self.raw(), name.as_ptr().cast(), name.len());
                match value {
                    Value::Number(number) => {
                        (api.reply_with_long_long)(self.raw(), (*number).cast_signed())
                    }
                    Value::Text(text) => {
                        (api.reply_with_string_buffer)(self.raw(), text.as_ptr().cast(), text.len())
                    }
                };
            }
            answer
        }
    }
}
