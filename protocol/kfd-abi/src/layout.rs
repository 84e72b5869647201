//! How a C definition is written down once: the macros here define the Rust type or constant, assert
//! its size and offsets at compile time, and put its C name into a table that the header check
//! (tests/headers.rs) compares with the installed C headers.

/// Since when a C header has an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Since {
    /// Every header that is supported at all.
    Always,
    /// Headers whose interface version (major 1 of `KFD_IOCTL_MAJOR_VERSION`) has at least this minor.
    KfdMinor(u32),
    /// Headers that define this preprocessor macro: for headers that carry no version number.
    Defined(&'static str),
}

/// A field of a [`CStruct`].
#[derive(Clone, Copy, Debug)]
pub struct CField {
    /// Path of the member in C, empty for padding that C leaves unnamed.
    pub name: &'static str,
    /// Offset from the start of the struct in bytes.
    pub offset: usize,
    /// Size in bytes.
    pub size: usize,
    /// Since when the header has the member; [`Since::Always`] means as long as the struct itself.
    pub since: Since,
}

/// A C struct or union.
#[derive(Clone, Copy, Debug)]
pub struct CStruct {
    /// The type as C spells it, `struct` or `union` included.
    pub name: &'static str,
    /// Size in bytes.
    pub size: usize,
    /// Since when the header has the type at all.
    pub since: Since,
    /// Since when the type has this size; [`Since::Always`] means as long as the struct itself.
    pub size_since: Since,
    /// All fields by offset.
    pub fields: &'static [CField],
}

/// How a C constant is defined, which decides whether the preprocessor can see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CConstKind {
    /// `#define`
    Macro,
    /// A member of an enum.
    Enum,
}

/// A C constant.
#[derive(Clone, Copy, Debug)]
pub struct CConst {
    /// First part of the C name, the same for a group.
    pub prefix: &'static str,
    /// Rest of the C name.
    pub name: &'static str,
    /// The value, zero-extended.
    pub value: u64,
    /// Width of the Rust type in bits; the C value is compared modulo this width.
    pub bits: u32,
    /// How C defines it.
    pub kind: CConstKind,
    /// Since when the header has it.
    pub since: Since,
}

macro_rules! since {
    () => {
        $crate::layout::Since::Always
    };
    ($since:expr) => {
        $since
    };
}
pub(crate) use since;

macro_rules! c_name {
    ($name:ident) => {
        stringify!($name)
    };
    ($name:ident $c:literal) => {
        $c
    };
}
pub(crate) use c_name;

/// Defines `repr(C)` structs without hidden padding, with checked size and offsets, and a table of them.
/// `pack N` is C's `#pragma pack(N)`.
macro_rules! abi_structs {
    (
        $(#[$table_meta:meta])*
        pub const $table:ident;
        $(
            $(#[$meta:meta])*
            struct $name:ident = $c:literal, size $size:literal $(, pack $pack:tt)?
                $(, since($since:expr))? $(, size_since($size_since:expr))? {
                $(
                    $(#[$field_meta:meta])*
                    $field:ident $(as $c_field:literal)?: $ty:ty = $offset:literal $(, since($field_since:expr))?;
                )*
            }
        )*
    ) => {
        $(
            $(#[$meta])*
            #[doc = concat!("\n\nC: `", $c, "`, ", stringify!($size), " bytes.")]
            #[repr(C $(, packed($pack))?)]
            #[derive(
                Clone, Copy, Debug, PartialEq, Eq,
                zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout,
            )]
            pub struct $name {
                $(
                    $(#[$field_meta])*
                    pub $field: $ty,
                )*
            }

            impl Default for $name {
                /// All bytes zero.
                fn default() -> Self {
                    zerocopy::FromZeros::new_zeroed()
                }
            }

            const _: () = assert!(size_of::<$name>() == $size);
            $(const _: () = assert!(core::mem::offset_of!($name, $field) == $offset);)*
        )*

        $(#[$table_meta])*
        pub const $table: &[$crate::layout::CStruct] = &[
            $(
                $crate::layout::CStruct {
                    name: $c,
                    size: $size,
                    since: $crate::layout::since!($($since)?),
                    size_since: $crate::layout::since!($($size_since)?),
                    fields: &[
                        $(
                            $crate::layout::CField {
                                name: $crate::layout::c_name!($field $($c_field)?),
                                offset: $offset,
                                size: size_of::<$ty>(),
                                since: $crate::layout::since!($($field_since)?),
                            },
                        )*
                    ],
                },
            )*
        ];
    };
}
pub(crate) use abi_structs;

/// Defines constants under their C names and a table of them.
macro_rules! abi_consts {
    (
        $(#[$table_meta:meta])*
        pub const $table:ident;
        $(
            $kind:ident $ty:ident {
                $(
                    $(#[$meta:meta])*
                    $name:ident = $value:expr $(, since($since:expr))?;
                )*
            }
        )*
    ) => {
        $($(
            $(#[$meta])*
            pub const $name: $ty = $value;
        )*)*

        $(#[$table_meta])*
        pub const $table: &[$crate::layout::CConst] = &[
            $($(
                $crate::layout::CConst {
                    prefix: "",
                    name: stringify!($name),
                    value: $name as u64,
                    bits: $ty::BITS,
                    kind: $crate::layout::CConstKind::$kind,
                    since: $crate::layout::since!($($since)?),
                },
            )*)*
        ];
    };
}
pub(crate) use abi_consts;

/// Defines a `bitflags` type whose flags are a C prefix and a name, and a table of them.
macro_rules! abi_flags {
    (
        $(#[$table_meta:meta])*
        pub const $table:ident;
        $(#[$meta:meta])*
        $kind:ident $name:ident: $ty:ident = $prefix:literal {
            $(
                $(#[doc = $flag_doc:literal])*
                $flag:ident = $value:expr $(, since($since:expr))?;
            )*
        }
    ) => {
        bitflags::bitflags! {
            $(#[$meta])*
            #[doc = concat!("\n\nC: `", $prefix, "*`. Unknown bits are kept.")]
            #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
            pub struct $name: $ty {
                $(
                    $(#[doc = $flag_doc])*
                    const $flag = $value;
                )*
                const _ = !0;
            }
        }

        $(#[$table_meta])*
        pub const $table: &[$crate::layout::CConst] = &[
            $(
                $crate::layout::CConst {
                    prefix: $prefix,
                    name: stringify!($flag),
                    value: $name::$flag.bits() as u64,
                    bits: $ty::BITS,
                    kind: $crate::layout::CConstKind::$kind,
                    since: $crate::layout::since!($($since)?),
                },
            )*
        ];
    };
}
pub(crate) use abi_flags;
