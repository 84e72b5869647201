//! What the front end served, for people: a line per call on the standard error output when
//! `VIRTIO_KFD_SEAM_TRACE` is set.

use std::fmt::Arguments;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::kernel::borrow;
use crate::service::{MapRequest, Result};

/// The environment variable that turns the trace on.
pub const VARIABLE: &str = "VIRTIO_KFD_SEAM_TRACE";

static ENABLED: AtomicBool = AtomicBool::new(false);

/// Reads the environment, once, when the library is loaded.
pub fn loaded() {
    ENABLED.store(std::env::var_os(VARIABLE).is_some(), Ordering::Relaxed);
}

/// A call that named a path of the service.
pub fn path<T>(call: &str, path: &Path, result: &Result<T>) {
    line(format_args!("{call} {} {}", path.display(), outcome(result)));
}

/// An ioctl.
pub fn ioctl(fd: i32, request: u32, result: &Result<i32>) {
    let kind = char::from((request >> 8 & 0x7f) as u8);
    line(format_args!("ioctl {fd} {request:#010x} '{kind}' {:#04x} {}", request & 0xff, outcome(result)));
}

/// An mmap.
pub fn mmap<T>(fd: i32, request: &MapRequest, result: &Result<T>) {
    line(format_args!(
        "mmap {fd} offset {:#x} length {:#x} protection {:#x} flags {:#x} {}",
        request.offset,
        request.length,
        request.protection,
        request.flags,
        outcome(result)
    ));
}

fn outcome<T>(result: &Result<T>) -> &'static str {
    match result {
        Ok(_) => "ok",
        Err(errno) => errno.desc(),
    }
}

fn line(arguments: Arguments<'_>) {
    if ENABLED.load(Ordering::Relaxed) {
        let text = format!("kfd-seam: {arguments}\n");
        if let Some(stderr) = borrow(libc::STDERR_FILENO) {
            // Nobody can be told that the standard error output is closed.
            let _ = rustix::io::write(stderr, text.as_bytes());
        }
    }
}
