//! Render nodes.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use kfd_abi::drm::amdgpu::Info;
use kfd_abi::drm::{Version, request};
use nix::errno::Errno;

use crate::call::{address, arguments, ioctl};
use crate::error::KfdError;
use crate::kfd::open_device;

arguments! {
    Version = "DRM_IOCTL_VERSION", request::VERSION;
    Info = "DRM_IOCTL_AMDGPU_INFO", request::AMDGPU_INFO;
}

/// An open render node of amdgpu.
#[derive(Debug)]
pub struct RenderNode {
    file: OwnedFd,
}

/// Version of the DRM driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverVersion {
    /// Major version.
    pub major: i32,
    /// Minor version.
    pub minor: i32,
    /// Patch level.
    pub patch: i32,
}

/// Most bytes of a driver's name that are looked at.
const NAME_BYTES: usize = 64;

/// Path of the render node with that minor number.
pub fn path(minor: u32) -> PathBuf {
    PathBuf::from(format!("/dev/dri/renderD{minor}"))
}

impl RenderNode {
    /// Opens `/dev/dri/renderD<minor>`, which has to be amdgpu's.
    pub fn open(minor: u32) -> Result<Self, KfdError> {
        let path = path(minor);
        let node = RenderNode { file: open_device(&path)? };
        let (_, name) = node.version_and_name()?;
        if name != b"amdgpu" {
            let found =
                format!("{}: driver {:?}, expected amdgpu", path.display(), name.escape_ascii().to_string());
            return Err(KfdError::new("DRM_IOCTL_VERSION", found, Errno::ENODEV));
        }
        Ok(node)
    }

    /// `DRM_IOCTL_VERSION`
    pub fn version(&self) -> Result<DriverVersion, KfdError> {
        self.version_and_name().map(|(version, _)| version)
    }

    fn version_and_name(&self) -> Result<(DriverVersion, Vec<u8>), KfdError> {
        let mut name = vec![0u8; NAME_BYTES];
        let mut args =
            Version { name_len: NAME_BYTES as u64, name: address(&mut name), ..Default::default() };
        ioctl(self.as_fd(), &mut args, String::new)?;
        name.truncate(usize::try_from(args.name_len).unwrap_or(NAME_BYTES));
        let version = DriverVersion {
            major: args.version_major,
            minor: args.version_minor,
            patch: args.version_patchlevel,
        };
        Ok((version, name))
    }

    /// `DRM_IOCTL_AMDGPU_INFO`: fills `answer` with what the query returns; what the kernel does not write stays as it is.
    /// `arguments` are the four words of the query's union.
    pub fn info(&self, query: u32, arguments: [u32; 4], answer: &mut [u8]) -> Result<(), KfdError> {
        let [dword_offset, count, instance, flags] = arguments;
        let mut args = Info {
            return_size: answer.len() as u32,
            return_pointer: address(answer),
            query,
            dword_offset,
            count,
            instance,
            flags,
        };
        let size = args.return_size;
        ioctl(self.as_fd(), &mut args, || format!("query {query:#x}, {arguments:?}, return_size {size}"))
    }
}

impl AsFd for RenderNode {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
