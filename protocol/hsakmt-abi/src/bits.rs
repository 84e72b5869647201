//! C bit-fields as named bit ranges of one word, open enums, and the tables of both for the header check.

use core::marker::PhantomData;

use crate::layout::{CConst, CStruct, Since};

/// A bit-field of the word type `W` (for instance [`crate::topology::HsaCapability`]).
pub struct BitField<W> {
    shift: u32,
    width: u32,
    word: PhantomData<fn(W)>,
}

impl<W> Clone for BitField<W> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<W> Copy for BitField<W> {}

impl<W> BitField<W> {
    /// Fails to compile for a field that is empty or does not fit into a word of `bits` bits.
    pub(crate) const fn new(shift: u32, width: u32, bits: u32) -> Self {
        assert!(width > 0 && shift + width <= bits);
        Self { shift, width, word: PhantomData }
    }

    /// Position of the lowest bit.
    pub const fn shift(self) -> u32 {
        self.shift
    }

    /// Number of bits.
    pub const fn width(self) -> u32 {
        self.width
    }

    /// The bits of the field in the word.
    pub const fn mask(self) -> u64 {
        (u64::MAX >> (64 - self.width)) << self.shift
    }
}

/// A bit-field for the header check.
#[derive(Clone, Copy, Debug)]
pub struct CBits {
    /// Path of the member in C.
    pub name: &'static str,
    /// Its bits in the word.
    pub mask: u64,
    /// Since when the header has it.
    pub since: Since,
}

/// A word of bit-fields for the header check.
#[derive(Clone, Copy, Debug)]
pub struct CWord {
    /// The type as C spells it.
    pub name: &'static str,
    /// Size in bytes.
    pub size: usize,
    /// Its bit-fields.
    pub fields: &'static [CBits],
}

/// An enum for the header check.
#[derive(Clone, Copy, Debug)]
pub struct CEnum {
    /// The type, without fields.
    pub c_type: CStruct,
    /// Its values; they need the type's own [`CStruct::since`] too.
    pub values: &'static [CConst],
}

/// Defines words of bit-fields: `NAME = "c.path", shift, width;`.
macro_rules! abi_bits {
    (
        $(#[$table_meta:meta])*
        pub const $table:ident;
        $(
            $(#[$meta:meta])*
            bits $word:ident: $ty:ident = $c:literal {
                $(
                    $(#[$field_meta:meta])*
                    $field:ident = $c_field:literal, $shift:literal, $width:literal $(, since($since:expr))?;
                )*
            }
        )*
    ) => {
        $(
            $(#[$meta])*
            #[doc = concat!("\n\nC: `", $c, "`.")]
            #[repr(transparent)]
            #[derive(
                Clone, Copy, Debug, Default, PartialEq, Eq, Hash,
                zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout,
            )]
            pub struct $word(pub $ty);

            impl $word {
                $(
                    $(#[$field_meta])*
                    pub const $field: $crate::bits::BitField<Self> =
                        $crate::bits::BitField::new($shift, $width, $ty::BITS);
                )*

                /// The value of a bit-field.
                pub const fn get(self, field: $crate::bits::BitField<Self>) -> $ty {
                    (self.0 & field.mask() as $ty) >> field.shift()
                }

                /// Whether a bit-field is not zero.
                pub const fn is_set(self, field: $crate::bits::BitField<Self>) -> bool {
                    self.get(field) != 0
                }

                /// The word with a bit-field changed; bits of the value beyond the field's width are cut off.
                #[must_use]
                pub const fn with(self, field: $crate::bits::BitField<Self>, value: $ty) -> Self {
                    let mask = field.mask() as $ty;
                    Self((self.0 & !mask) | ((value << field.shift()) & mask))
                }
            }
        )*

        $(#[$table_meta])*
        pub const $table: &[$crate::bits::CWord] = &[
            $(
                $crate::bits::CWord {
                    name: $c,
                    size: size_of::<$word>(),
                    fields: &[
                        $(
                            $crate::bits::CBits {
                                name: $c_field,
                                mask: $word::$field.mask(),
                                since: $crate::layout::since!($($since)?),
                            },
                        )*
                    ],
                },
            )*
        ];
    };
}
pub(crate) use abi_bits;

macro_rules! c_value {
    ($prefix:literal, $value:ident) => {
        concat!($prefix, stringify!($value))
    };
    ($prefix:literal, $value:ident $c:literal) => {
        $c
    };
}
pub(crate) use c_value;

/// Defines C enums as open newtypes: unknown values are kept.
macro_rules! abi_enums {
    (
        $(#[$table_meta:meta])*
        pub const $table:ident;
        $(
            $(#[$meta:meta])*
            enum $name:ident: $ty:ident = $c:literal, $prefix:literal $(, since($type_since:expr))? {
                $(
                    $(#[$value_meta:meta])*
                    $value:ident $(as $c_value:literal)? = $number:expr $(, since($since:expr))?;
                )*
            }
        )*
    ) => {
        $(
            $(#[$meta])*
            #[doc = concat!("\n\nC: `", $c, "`. Any value can occur.")]
            #[repr(transparent)]
            #[derive(
                Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash,
                zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout,
            )]
            pub struct $name(pub $ty);

            impl $name {
                $(
                    $(#[$value_meta])*
                    pub const $value: Self = Self($number);
                )*

                /// The C name, none for an unknown value.
                pub const fn name(self) -> Option<&'static str> {
                    $(
                        if self.0 == $number {
                            return Some($crate::bits::c_value!($prefix, $value $($c_value)?));
                        }
                    )*
                    None
                }
            }
        )*

        $(#[$table_meta])*
        pub const $table: &[$crate::bits::CEnum] = &[
            $(
                $crate::bits::CEnum {
                    c_type: $crate::layout::CStruct {
                        name: $c,
                        size: size_of::<$name>(),
                        since: $crate::layout::since!($($type_since)?),
                        size_since: $crate::layout::Since::Always,
                        fields: &[],
                    },
                    values: &[
                        $(
                            $crate::layout::CConst {
                                prefix: "",
                                name: $crate::bits::c_value!($prefix, $value $($c_value)?),
                                value: $name::$value.0 as u64,
                                bits: $ty::BITS,
                                kind: $crate::layout::CConstKind::Enum,
                                since: $crate::layout::since!($($since)?),
                            },
                        )*
                    ],
                },
            )*
        ];
    };
}
pub(crate) use abi_enums;

#[cfg(test)]
mod tests {
    use crate::topology::HsaCapability;

    #[test]
    fn bit_fields() {
        let capability = HsaCapability(0).with(HsaCapability::DOORBELL_TYPE, 6);
        assert_eq!(capability.0, 2 << 12);
        assert_eq!(capability.get(HsaCapability::DOORBELL_TYPE), 2);
        assert!(!capability.is_set(HsaCapability::SVM_API_SUPPORTED));
        assert_eq!(capability.with(HsaCapability::DOORBELL_TYPE, 0).0, 0);
    }
}
