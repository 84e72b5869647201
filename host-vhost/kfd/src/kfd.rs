//! `/dev/kfd` as an open file.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use kfd_abi::kfd::request;
use kfd_abi::version::GetVersionArgs;
use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;

use crate::call::{arguments, ioctl};
use crate::error::KfdError;

/// Path of the device.
pub const KFD_PATH: &str = "/dev/kfd";

/// The open device. The first open makes a KFD process for the calling process; it ends when the last
/// file and mapping are gone, or with the process.
#[derive(Debug)]
pub struct Kfd {
    file: OwnedFd,
}

/// The interface version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version {
    /// 1 in all kernels.
    pub major: u32,
    /// What there is, see [`kfd_abi::version::minor`].
    pub minor: u32,
}

arguments! {
    GetVersionArgs = "AMDKFD_IOC_GET_VERSION", request::GET_VERSION;
}

/// Opens a device file for reading and writing, close-on-exec; again when a signal interrupts it.
pub(crate) fn open_device(path: &Path) -> Result<OwnedFd, KfdError> {
    loop {
        match open(path, OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty()) {
            Ok(file) => return Ok(file),
            Err(Errno::EINTR) => continue,
            Err(errno) => return Err(KfdError::new("open", path.display().to_string(), errno)),
        }
    }
}

impl Kfd {
    /// Opens [`KFD_PATH`].
    pub fn open() -> Result<Self, KfdError> {
        Ok(Kfd { file: open_device(Path::new(KFD_PATH))? })
    }

    /// `AMDKFD_IOC_GET_VERSION`
    pub fn version(&self) -> Result<Version, KfdError> {
        let mut args = GetVersionArgs::default();
        ioctl(self.as_fd(), &mut args, String::new)?;
        Ok(Version { major: args.major_version, minor: args.minor_version })
    }
}

impl AsFd for Kfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_call_argument_and_errno() {
        let error = open_device(Path::new("/nonexistent/kfd")).unwrap_err();
        assert_eq!(error.errno, Errno::ENOENT);
        assert_eq!(error.to_string(), "open(/nonexistent/kfd): ENOENT: No such file or directory");
        // A file that knows no ioctls.
        let file = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null").unwrap();
        let error = Kfd { file: file.into() }.set_event(7).unwrap_err();
        assert_eq!(error.to_string(), "AMDKFD_IOC_SET_EVENT(event_id 7): ENOTTY: Not a typewriter");
    }
}
