//! The macro behind the function tables: how the functions of a library are looked up.

/// Declares a struct of function pointers and a function that fills it from a library.
macro_rules! function_table {
    (
        pub(crate) struct $table:ident {
            required { $($required:ident: $required_type:ty,)* }
            optional { $($optional:ident: $optional_type:ty,)* }
        }
    ) => {
        /// Functions of one library. An optional function is `None` if the library is too old to
        /// have it.
        #[derive(Clone, Copy)]
        pub(crate) struct $table {
            $(pub(crate) $required: $required_type,)*
            $(pub(crate) $optional: Option<$optional_type>,)*
        }

        impl $table {
            /// Looks up every function. `Err` carries the name of a missing required function.
            ///
            /// # Safety
            /// `library` must be the library that the headers describe, and must stay loaded while
            /// the table is in use.
            pub(crate) unsafe fn load(
                library: &libloading::os::unix::Library,
            ) -> Result<Self, &'static str> {
                // SAFETY: the caller guarantees that this is the right library, so each symbol has
                // the type that the generated table gives it.
                unsafe {
                    Ok(Self {
                        $($required: *library
                            .get::<$required_type>(stringify!($required))
                            .map_err(|_| stringify!($required))?,)*
                        $($optional: library
                            .get::<$optional_type>(stringify!($optional))
                            .ok()
                            .map(|symbol| *symbol),)*
                    })
                }
            }
        }
    };
}
pub(super) use function_table;
