//! Named numbers of the C interface: states, statuses, kinds of event.
//!
//! These numbers come from a device or a kernel that may be newer than this library. So an unknown
//! number is kept, compared and printed. It never causes a panic or undefined behaviour.

/// Declares a type for one kind of number, with a constant and a display text for each known value.
macro_rules! codes {
    (
        $(#[$meta:meta])*
        pub struct $code:ident, unknown: $unknown:literal {
            $($(#[$doc:meta])* $name:ident = $value:expr, $text:literal;)*
        }
    ) => {
        $(#[$meta])*
        ///
        /// Values newer than this library are kept as numbers.
        #[derive(Clone, Copy, PartialEq, Eq, Hash)]
        pub struct $code(pub(crate) u32);

        impl $code {
            $(
                $(#[$doc])*
                #[doc = ""]
                #[doc = concat!("Displayed as “", $text, "”.")]
                pub const $name: Self = Self($value);
            )*

            /// Creates a code from a number, known or not.
            #[must_use]
            pub const fn from_code(code: u32) -> Self {
                Self(code)
            }

            /// Returns the number.
            #[must_use]
            pub fn code(self) -> u32 {
                self.0
            }
        }

        impl std::fmt::Display for $code {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                match *self {
                    $(Self::$name => f.write_str($text),)*
                    Self(other) => write!(f, concat!($unknown, " {}"), other),
                }
            }
        }

        impl std::fmt::Debug for $code {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                std::fmt::Display::fmt(self, f)
            }
        }
    };
}
pub(crate) use codes;

#[cfg(test)]
mod tests {
    use crate::Status;

    #[test]
    fn displays_known_and_unknown_codes() {
        assert_eq!(Status::SUCCESS.to_string(), "success");
        assert_eq!(format!("{:?}", Status(4711)), "unknown status 4711");
        assert_eq!(Status(4711).code(), 4711);
    }
}
