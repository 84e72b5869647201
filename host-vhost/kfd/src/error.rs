//! Errors of kernel calls.

use nix::errno::Errno;
use thiserror::Error;

/// A call that the kernel refused.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{call}({argument}): {errno}")]
pub struct KfdError {
    /// The call: `open`, `mmap` or the ioctl's name in C.
    pub call: &'static str,
    /// Its arguments, as far as they matter.
    pub argument: String,
    /// The kernel's answer.
    pub errno: Errno,
}

impl KfdError {
    /// An error of `call`.
    pub fn new(call: &'static str, argument: impl Into<String>, errno: Errno) -> Self {
        KfdError { call, argument: argument.into(), errno }
    }
}
