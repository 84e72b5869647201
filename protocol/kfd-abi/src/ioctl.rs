//! Linux ioctl request numbers (include/uapi/asm-generic/ioctl.h) and the macro that writes a
//! device's ioctls down once, as numbers and as a table.

/// Which way the argument struct goes, seen from the caller (`_IOC_DIR`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// `_IO`: no argument struct.
    None,
    /// `_IOW`: the caller writes, the kernel only reads.
    Write,
    /// `_IOR`: the kernel writes, the caller only reads.
    Read,
    /// `_IOWR`: both.
    ReadWrite,
}

impl Direction {
    /// The two direction bits of a request number.
    pub const fn bits(self) -> u32 {
        match self {
            Self::None => 0,
            Self::Write => 1,
            Self::Read => 2,
            Self::ReadWrite => 3,
        }
    }
}

const NR_BITS: u32 = 8;
const TYPE_SHIFT: u32 = NR_BITS;
const SIZE_SHIFT: u32 = TYPE_SHIFT + 8;
const SIZE_BITS: u32 = 14;
const DIR_SHIFT: u32 = SIZE_SHIFT + SIZE_BITS;

/// Largest argument size in bytes that a request number can carry.
pub const SIZE_MAX: usize = (1 << SIZE_BITS) - 1;

/// `_IOC`: the request number of an ioctl. A size over [`SIZE_MAX`] is cut to its low 14 bits.
pub const fn request(direction: Direction, kind: u8, nr: u8, size: usize) -> u32 {
    (direction.bits() << DIR_SHIFT)
        | (((size & SIZE_MAX) as u32) << SIZE_SHIFT)
        | ((kind as u32) << TYPE_SHIFT)
        | nr as u32
}

/// `_IOC_NR`: the number within the device's type.
pub const fn request_nr(request: u32) -> u8 {
    (request & 0xff) as u8
}

/// `_IOC_TYPE`: the device's letter.
pub const fn request_kind(request: u32) -> u8 {
    ((request >> TYPE_SHIFT) & 0xff) as u8
}

/// `_IOC_SIZE`: the size in bytes of the caller's argument struct.
pub const fn request_size(request: u32) -> usize {
    ((request >> SIZE_SHIFT) as usize) & SIZE_MAX
}

/// `_IOC_DIR`.
pub const fn request_direction(request: u32) -> Direction {
    match request >> DIR_SHIFT {
        0 => Direction::None,
        1 => Direction::Write,
        2 => Direction::Read,
        _ => Direction::ReadWrite,
    }
}

/// One ioctl of a device.
#[derive(Clone, Copy, Debug)]
pub struct Ioctl {
    /// Number within the device's type (`_IOC_NR`).
    pub nr: u8,
    /// Name without the C prefix, e.g. `GET_VERSION`.
    pub name: &'static str,
    /// Prefix of the C name, e.g. `AMDKFD_IOC_`.
    pub prefix: &'static str,
    /// Size in bytes of the argument struct in the newest known version. Callers may pass a
    /// shorter or longer one (see [`crate::version`]).
    pub size: usize,
    /// Which way the argument goes.
    pub direction: Direction,
    /// First interface minor that has it. /dev/kfd: of major 1, where 1 stands for everything
    /// older than the header's list of versions. Render node: 0, its ioctls here are older than any
    /// kernel that is supported.
    pub since_minor: u32,
    /// The whole request number for [`Ioctl::size`].
    pub request: u32,
}

/// Finds an ioctl by number.
pub fn by_nr(table: &'static [Ioctl], nr: u8) -> Option<&'static Ioctl> {
    table.iter().find(|ioctl| ioctl.nr == nr)
}

/// Defines the numbers (`nr`), request numbers (`request`) and the table of a device's ioctls.
macro_rules! ioctls {
    (
        $(#[$table_meta:meta])*
        pub const $table:ident: $prefix:literal, $kind:expr;
        $(
            $(#[$meta:meta])*
            $name:ident = $nr:expr, $direction:ident, $ty:ty, since $since:literal;
        )*
    ) => {
        /// Numbers within the device's type (`_IOC_NR`).
        pub mod nr {
            #[allow(unused_imports, reason = "only some devices count from a base that is defined beside them")]
            use super::*;
            $(
                $(#[$meta])*
                pub const $name: u8 = $nr;
            )*
        }

        /// Whole request numbers, with the size of the newest known argument struct.
        pub mod request {
            use super::*;
            $(
                $(#[$meta])*
                pub const $name: u32 = $crate::ioctl::request(
                    $crate::ioctl::Direction::$direction,
                    $kind,
                    super::nr::$name,
                    size_of::<$ty>(),
                );
            )*
        }

        $(#[$table_meta])*
        pub const $table: &[$crate::ioctl::Ioctl] = &[
            $(
                $crate::ioctl::Ioctl {
                    nr: nr::$name,
                    name: stringify!($name),
                    prefix: $prefix,
                    size: size_of::<$ty>(),
                    direction: $crate::ioctl::Direction::$direction,
                    since_minor: $since,
                    request: request::$name,
                },
            )*
        ];
    };
}
pub(crate) use ioctls;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_number_comes_apart_again() {
        let number = request(Direction::ReadWrite, b'K', 0x02, 96);
        assert_eq!(request_nr(number), 0x02);
        assert_eq!(request_kind(number), b'K');
        assert_eq!(request_size(number), 96);
        assert_eq!(request_direction(number), Direction::ReadWrite);
    }
}
