//! How frames and blobs reach the host.

#[cfg(feature = "loopback")]
pub mod loopback;
pub mod own;
#[allow(unsafe_code)] // ioctls and mmap
pub mod virtgpu;

use std::any::Any;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use thiserror::Error;
use virtio_kfd_protocol::{Capset, GuestVa, Handle, ResourceId};

/// Why a transport failed.
#[derive(Debug, Error)]
pub enum TransportError {
    /// No device speaks virtio-kfd here.
    #[error("no virtio-kfd device: {0}")]
    NoDevice(String),
    /// The device speaks another version or protocol.
    #[error(transparent)]
    Handshake(#[from] virtio_kfd_protocol::HandshakeError),
    /// A system call on the device failed.
    #[error("{call} ({detail}): {error}")]
    System {
        /// The call.
        call: &'static str,
        /// What it was about: argument, found, expected.
        detail: String,
        /// Its error.
        error: io::Error,
    },
    /// The host is gone, or has ended this context.
    #[error("the connection to the host is lost: {0}")]
    Lost(String),
    /// The transport or the VMM cannot do this.
    #[error("not supported here: {0}")]
    NotSupported(&'static str),
}

/// Result of a transport call.
pub type Result<T> = core::result::Result<T, TransportError>;

/// A blob: memory that guest and host share.
///
/// Drop it when nothing maps it any more and the host has freed the buffers on it: dropping gives the memory back.
/// (With virtgpu the kernel keeps the memory until the last unmap; loop-back cannot see an unmap.) In a forked child,
/// dropping does nothing, for the blob is the parent's.
pub trait Blob: Send + Sync {
    /// Its virtio-gpu resource id.
    fn resource(&self) -> ResourceId;
    /// Bytes, a multiple of the page size.
    fn size(&self) -> u64;
    /// Maps the first `length` bytes at exactly `address`, over whatever is mapped there (the caller reserved it),
    /// shared and with these `PROT_*`. Both are multiples of the page size. A HOST3D blob can only be mapped as
    /// a whole, and no blob from its middle: the guest's driver refuses both (`virtio_gpu_vram_mmap`,
    /// `drm_gem_mmap`).
    fn map_fixed(&self, address: GuestVa, length: u64, protection: i32) -> Result<()>;
    /// A dma-buf descriptor of the whole blob, close-on-exec: what [`Transport::import`] takes, in this process or another
    /// one of the same guest. It keeps the memory for as long as it is open. (In loop-back it stands for the memory, but does
    /// not show it.)
    fn export(&self) -> Result<OwnedFd>;
    /// Where `mmap` of [`Transport::device`] shows the blob, in bytes.
    fn mmap_offset(&self) -> Result<u64>;
    /// Closes the handle of a blob that is mapped. With virtgpu the mapping alone then keeps the memory, and the
    /// last unmap, whoever does it, ends the resource. Loop-back cannot see an unmap: there the memory goes when the
    /// result is dropped.
    fn close_handle(self: Box<Self>) -> Box<dyn Any + Send + Sync>;
}

/// A way to the host. One object is one virtio-gpu context, which is one guest process.
///
/// In a forked child every method fails and none takes a lock: the context is the parent's.
pub trait Transport: Send + Sync {
    /// The host's capset, read before the context was made.
    fn capset(&self) -> &Capset;

    /// Sends a frame on a ring and returns when its fence has completed (the answer then stands in the blob that
    /// the frame names) or the connection is lost, which it also is when the fence has not completed after `limit`.
    /// Frames of one ring complete in order; rings do not wait for each other. Signals that interrupt the wait
    /// are waited through. An error other than [`TransportError::Lost`] means that the frame was not sent.
    fn submit_and_wait(&self, ring: u8, frame: &[u8], limit: Duration) -> Result<()>;

    /// Makes a GUEST blob: zeroed memory of the guest, of `size` bytes, a multiple of the page size.
    fn guest_blob(&self, size: u64) -> Result<Box<dyn Blob>>;

    /// Bytes that GUEST blobs could have in all at this moment, where that is known: the guest's kernel would push all else
    /// out of memory to serve more, and then fail.
    fn guest_memory_left(&self) -> Option<u64> {
        None
    }

    /// Memory for guest and host that the guest's kernel treats as ordinary pages, where there is such: zeroed, of `size` bytes, a
    /// multiple of the page size. It can be mapped once, and not exported. Whether the host has it shows at its first
    /// use.
    fn ordinary_memory(&self, _size: u64) -> Option<Box<dyn Blob>> {
        None
    }

    /// Makes a HOST3D blob that shows the memory of a buffer.
    fn host_blob(&self, buffer: Handle, size: u64) -> Result<Box<dyn Blob>> {
        self.host_memory(buffer.0, size, true)
    }

    /// Makes a HOST3D blob of what `blob_id` names: a buffer ([`Handle`]), or what another context shares
    /// ([`virtio_kfd_protocol::ShareToken`]). One that is not mappable takes no place in the window. A wrong `blob_id` is
    /// an error at once or, as Linux does not look at the device's answer, at the first use.
    fn host_memory(&self, blob_id: u64, size: u64, mappable: bool) -> Result<Box<dyn Blob>>;

    /// Takes the blob behind a dma-buf of this device, and attaches it to this context. A dma-buf of anything else is an
    /// error.
    fn import(&self, dma_buf: BorrowedFd<'_>) -> Result<Box<dyn Blob>>;

    /// The descriptor of the device, where there is one.
    fn device(&self) -> Option<BorrowedFd<'_>>;

    /// For a forked child: closes the inherited descriptors, so that the parent's context ends with the parent.
    /// Only async-signal-safe calls, so an atfork handler may use it. Does nothing in the process that connected.
    fn abandon(&self);
}
