//! The part of the FUSE protocol that the pool needs (include/uapi/linux/fuse.h of Linux 6.12, interface 7.38).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// `FUSE_KERNEL_VERSION`
pub const MAJOR: u32 = 7;
/// What is spoken: requests that are newer are answered with ENOSYS.
pub const MINOR: u32 = 38;
/// The first version with `FUSE_SETUPMAPPING`.
pub const MINOR_AT_LEAST: u32 = 31;

/// `FUSE_MAP_ALIGNMENT`: `map_alignment` is valid.
pub const FLAG_MAP_ALIGNMENT: u32 = 1 << 26;
/// `FATTR_SIZE`
pub const SET_SIZE: u32 = 1 << 3;
/// `FATTR_MODE | FATTR_UID | FATTR_GID`
pub const SET_RIGHTS: u32 = 7;
/// `S_IFREG | 0600`
pub const MODE_FILE: u32 = 0o100_600;
/// `S_IFDIR | 0733`: whoever reaches the mount makes files, and only root could list them.
pub const MODE_DIRECTORY: u32 = 0o040_733;

/// Requests that are more than refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names of the header, without their prefix")]
pub enum Opcode {
    Lookup,
    Forget,
    GetAttr,
    SetAttr,
    StatFs,
    Release,
    Init,
    Interrupt,
    Create,
    Destroy,
    BatchForget,
    SetupMapping,
    RemoveMapping,
    Other(u32),
}

impl Opcode {
    /// By its number.
    pub fn from_number(number: u32) -> Self {
        match number {
            1 => Opcode::Lookup,
            2 => Opcode::Forget,
            3 => Opcode::GetAttr,
            4 => Opcode::SetAttr,
            17 => Opcode::StatFs,
            18 => Opcode::Release,
            26 => Opcode::Init,
            35 => Opcode::Create,
            36 => Opcode::Interrupt,
            38 => Opcode::Destroy,
            42 => Opcode::BatchForget,
            48 => Opcode::SetupMapping,
            49 => Opcode::RemoveMapping,
            other => Opcode::Other(other),
        }
    }

    /// Whether the kernel waits for an answer.
    pub fn is_answered(self) -> bool {
        !matches!(self, Opcode::Forget | Opcode::BatchForget | Opcode::Interrupt)
    }
}

macro_rules! structures {
    ($($(#[doc = $doc:literal])* $name:ident $size:literal { $($field:ident: $type:ty),* $(,)? })*) => {
        $(
            $(#[doc = $doc])*
            #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
            #[repr(C)]
            #[allow(missing_docs, reason = "the fields of the header")]
            pub struct $name { $(pub $field: $type),* }
            const _: () = assert!(size_of::<$name>() == $size);
        )*
    };
}

structures! {
    /// `struct fuse_in_header`
    InHeader 40 {
        len: u32, opcode: u32, unique: u64, nodeid: u64, uid: u32, gid: u32, pid: u32, total_extlen: u16, padding: u16,
    }
    /// `struct fuse_out_header`
    OutHeader 16 { len: u32, error: i32, unique: u64 }
    /// `struct fuse_init_in`, as far as it is read
    InitIn 16 { major: u32, minor: u32, max_readahead: u32, flags: u32 }
    /// `struct fuse_init_out`
    InitOut 64 {
        major: u32, minor: u32, max_readahead: u32, flags: u32, max_background: u16, congestion_threshold: u16,
        max_write: u32, time_gran: u32, max_pages: u16, map_alignment: u16, flags2: u32, max_stack_depth: u32,
        unused: [u32; 6],
    }
    /// `struct fuse_attr`
    Attr 88 {
        ino: u64, size: u64, blocks: u64, atime: u64, mtime: u64, ctime: u64, atimensec: u32, mtimensec: u32,
        ctimensec: u32, mode: u32, nlink: u32, uid: u32, gid: u32, rdev: u32, blksize: u32, flags: u32,
    }
    /// `struct fuse_attr_out`
    AttrOut 104 { attr_valid: u64, attr_valid_nsec: u32, dummy: u32, attr: Attr }
    /// `struct fuse_entry_out` and `struct fuse_open_out`, the answer to FUSE_CREATE
    CreateOut 144 {
        nodeid: u64, generation: u64, entry_valid: u64, attr_valid: u64, entry_valid_nsec: u32, attr_valid_nsec: u32,
        attr: Attr, fh: u64, open_flags: u32, backing_id: i32,
    }
    /// `struct fuse_create_in`; the name follows
    CreateIn 16 { flags: u32, mode: u32, umask: u32, open_flags: u32 }
    /// `struct fuse_setattr_in`, as far as it is read
    SetAttrIn 24 { valid: u32, padding: u32, fh: u64, size: u64 }
    /// `struct fuse_forget_in`
    ForgetIn 8 { nlookup: u64 }
    /// `struct fuse_batch_forget_in`; the nodes follow
    BatchForgetIn 8 { count: u32, dummy: u32 }
    /// `struct fuse_forget_one`
    ForgetOne 16 { nodeid: u64, nlookup: u64 }
    /// `struct fuse_setupmapping_in`
    SetupMappingIn 40 { fh: u64, foffset: u64, len: u64, flags: u64, moffset: u64 }
    /// `struct fuse_removemapping_in`; the places follow
    RemoveMappingIn 4 { count: u32 }
    /// `struct fuse_removemapping_one`
    RemoveMappingOne 16 { moffset: u64, len: u64 }
    /// `struct fuse_statfs_out`
    StatFsOut 80 {
        blocks: u64, bfree: u64, bavail: u64, files: u64, ffree: u64, bsize: u32, namelen: u32, frsize: u32,
        padding: u32, spare: [u32; 6],
    }
}
