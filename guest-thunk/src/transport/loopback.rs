//! A VM without a VM: this process plays the VMM and the guest's virtio-gpu driver against a real `vhost-user-kfd`.
//!
//! Guest memory is a sparse memfd, the virtqueues are real ones in it, the device is spoken to by vhost-user. Only
//! the guest's kernel and the VMM are missing. [`LoopbackContext`] is a transport like virtgpu; [`LoopbackVm`] also lets a
//! test be a hostile guest, with commands and descriptors of its own making.
//!
//! Such a VM is one process's own. [`host::VmHost`] keeps a VM for several processes, each of which is a [`SharedContext`] of it.

mod blob;
pub mod command;
mod context;
mod exports;
mod extents;
pub mod host;
mod pending;
mod process;
pub mod queue;
pub mod ram;
mod vmm;
mod window;
mod wire;

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use vhost::vhost_user::Frontend;

pub use self::context::LoopbackContext;
pub use self::process::SharedContext;
pub use self::window::Window;

use self::command::Config;
use self::exports::Exports;
use self::queue::{Queue, Submission};
use self::ram::Ram;
use self::vmm::Vm;
use super::{Result, TransportError};

/// Environment variable: bytes of guest memory in MiB. Only what is used takes memory.
pub const RAM_VARIABLE: &str = "VIRTIO_KFD_LOOPBACK_RAM";

/// Environment variable: 1 takes each page of guest memory apart from the others and in no order, as after
/// long use of a real guest.
pub const SCATTER_VARIABLE: &str = "VIRTIO_KFD_LOOPBACK_SCATTER";

/// Page size of the guest in bytes.
pub const PAGE: u64 = 4096;

const DEFAULT_RAM: u64 = 64 << 30;

/// The longest that a command that does not block may take.
const COMMAND_LIMIT: Duration = Duration::from_secs(120);

/// How the VM is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoopbackOptions {
    /// Bytes of guest memory.
    pub ram_bytes: u64,
    /// Whether no two pages that are taken together are neighbours.
    pub scatter: bool,
    /// Whether maps in the window are told to the device as memory regions, as QEMU does.
    pub announce_maps: bool,
    /// How long the device may take to answer the vhost-user messages that set it up.
    pub patience: Duration,
}

impl Default for LoopbackOptions {
    fn default() -> Self {
        LoopbackOptions {
            ram_bytes: DEFAULT_RAM,
            scatter: false,
            announce_maps: true,
            patience: Duration::from_secs(30),
        }
    }
}

impl LoopbackOptions {
    /// As the environment says.
    pub fn from_environment() -> Result<LoopbackOptions> {
        let mut options = LoopbackOptions::default();
        if let Some(text) = std::env::var_os(RAM_VARIABLE) {
            let bytes = text.to_str().and_then(|text| text.parse::<u64>().ok()?.checked_mul(1 << 20));
            options.ram_bytes = bytes.filter(|&bytes| bytes > 0).ok_or_else(|| {
                TransportError::NoDevice(format!("{RAM_VARIABLE}={text:?}: expected a number of MiB"))
            })?;
        }
        options.scatter = std::env::var_os(SCATTER_VARIABLE).is_some_and(|text| text == "1");
        Ok(options)
    }
}

/// Keeps the VM. In a forked child the VM is never dropped: its threads are not there, and its memory is not mapped.
struct VmHandle(Arc<Vm>);

impl Clone for VmHandle {
    fn clone(&self) -> Self {
        VmHandle(Arc::clone(&self.0))
    }
}

impl Drop for VmHandle {
    fn drop(&mut self) {
        if !self.0.is_mine() {
            std::mem::forget(Arc::clone(&self.0));
        }
    }
}

/// A VM that someone else keeps.
struct WeakVm(Weak<Vm>);

impl WeakVm {
    fn upgrade(&self) -> Option<LoopbackVm> {
        self.0.upgrade().map(|vm| LoopbackVm { vm: VmHandle(vm) })
    }
}

/// A VM that is connected to a device.
#[derive(Clone)]
pub struct LoopbackVm {
    vm: VmHandle,
}

impl LoopbackVm {
    /// Connects to the socket of a `vhost-user-kfd`, with options from the environment.
    pub fn connect(socket: &Path) -> Result<LoopbackVm> {
        LoopbackVm::connect_with(socket, &LoopbackOptions::from_environment()?)
    }

    /// Connects to the socket of a `vhost-user-kfd`.
    pub fn connect_with(socket: &Path, options: &LoopbackOptions) -> Result<LoopbackVm> {
        Ok(LoopbackVm { vm: VmHandle(Arc::new(Vm::connect(socket, options)?)) })
    }

    /// Makes a context, which is a guest process.
    pub fn context(&self) -> Result<LoopbackContext> {
        LoopbackContext::new(self)
    }

    /// The device's configuration space.
    pub fn config(&self) -> Config {
        self.vm.0.config
    }

    /// Guest memory.
    pub fn ram(&self) -> &Arc<Ram> {
        &self.vm.0.ram
    }

    /// The control queue.
    pub fn control_queue(&self) -> &Queue {
        let [control, _] = &self.vm.0.queues;
        control
    }

    /// The cursor queue.
    pub fn cursor_queue(&self) -> &Queue {
        let [_, cursor] = &self.vm.0.queues;
        cursor
    }

    /// The window for host memory, if the device has one.
    pub fn window(&self) -> Option<&Window> {
        self.vm.0.window.as_deref()
    }

    /// The main channel, for messages that a VMM sends: memory hot-plug, queue stops, resets.
    pub fn frontend(&self) -> Frontend {
        self.vm.0.frontend.clone()
    }

    /// Sends any bytes as a command (at most a page) and more as data behind it, and gives the response: at most
    /// `capacity` bytes, at most a page.
    pub fn command(&self, command: &[u8], data: &[u8], capacity: usize) -> Result<Vec<u8>> {
        self.usable()?;
        let submission = Submission { command, data, capacity, timeline: None };
        self.control_queue().submit(&submission)?.response(COMMAND_LIMIT)
    }

    /// A resource id that has not been given out yet.
    pub fn new_resource_id(&self) -> u32 {
        self.vm.0.next_resource.fetch_add(1, Ordering::Relaxed)
    }

    /// The connection to the device, on which nothing is to be read or written: `poll` tells when the device is gone.
    fn device(&self) -> BorrowedFd<'_> {
        self.vm.0.socket()
    }

    fn downgrade(&self) -> WeakVm {
        WeakVm(Arc::downgrade(&self.vm.0))
    }

    fn exports(&self) -> &Exports {
        &self.vm.0.exports
    }

    fn new_context_id(&self) -> u32 {
        self.vm.0.next_context.fetch_add(1, Ordering::Relaxed)
    }

    fn usable(&self) -> Result<()> {
        if self.vm.0.is_mine() {
            return Ok(());
        }
        Err(TransportError::NotSupported("a VM that a parent process made"))
    }

    fn abandon(&self) {
        self.vm.0.abandon();
    }
}

fn system(call: &'static str, detail: impl Into<String>, error: io::Error) -> TransportError {
    TransportError::System { call, detail: detail.into(), error }
}

/// The descriptor of something that only tells its number.
#[allow(unsafe_code)] // vhost and vmm-sys-util predate AsFd
fn borrow<T: AsRawFd>(owner: &T) -> Result<BorrowedFd<'_>> {
    let raw = owner.as_raw_fd();
    if raw < 0 {
        return Err(system("fcntl", format!("descriptor {raw}"), io::Error::from_raw_os_error(libc::EBADF)));
    }
    // SAFETY: the owner keeps the descriptor open as long as it is borrowed.
    Ok(unsafe { BorrowedFd::borrow_raw(raw) })
}

/// A second descriptor of the same file, close-on-exec.
#[allow(unsafe_code)] // vhost and vmm-sys-util predate AsFd
fn duplicate<T: AsRawFd>(owner: &T) -> Result<OwnedFd> {
    // SAFETY: fcntl takes no pointer here.
    let copy = unsafe { libc::fcntl(owner.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 0) };
    if copy < 0 {
        return Err(system("fcntl", "F_DUPFD_CLOEXEC", io::Error::last_os_error()));
    }
    // SAFETY: fcntl has just made this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}
