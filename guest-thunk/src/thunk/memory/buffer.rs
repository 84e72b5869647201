//! KFD's buffers of VRAM, and parts of them. A buffer may have several holders: an allocation, imports of it in the same
//! process, an arena and what lies in it. KFD frees it with the last one.

use std::sync::{Arc, Mutex};

use virtio_kfd_protocol::calls::{FreeMemory, ShareMemory, UnshareMemory};
use virtio_kfd_protocol::{
    BufferRequest, GpuId, Handle, ShareMemoryRequest, ShareToken, UnshareMemoryRequest,
};

use crate::client::Client;
use crate::thunk::lock::lock;
use crate::thunk::refusal::Outcome;
use crate::transport::Blob;

/// A buffer.
pub struct Buffer {
    /// KFD's number for it.
    pub handle: Handle,
    /// Bytes of memory.
    pub size: u64,
    /// Whose memory it is.
    pub gpu: GpuId,
    /// Whether the CPU can be shown it.
    pub visible: bool,
    /// Whether it was made for that.
    pub public: bool,
    holders: Mutex<usize>,
}

impl Buffer {
    /// A buffer that KFD has made, with one holder.
    pub fn new(handle: Handle, size: u64, gpu: GpuId, visible: bool, public: bool) -> Arc<Buffer> {
        Arc::new(Buffer { handle, size, gpu, visible, public, holders: Mutex::new(1) })
    }

    /// Holds it once more. False if KFD has freed it.
    fn hold(&self) -> bool {
        let mut holders = lock(&self.holders);
        let there = *holders > 0;
        if there {
            *holders = holders.saturating_add(1);
        }
        there
    }

    /// Lets go of it. If KFD does not free it, the caller still holds it.
    pub fn release(&self, client: &Client) -> Outcome<()> {
        let mut holders = lock(&self.holders);
        if *holders == 1 {
            client.call::<FreeMemory>(&BufferRequest { handle: self.handle }, &[], 0)?;
        }
        *holders = holders.saturating_sub(1);
        Ok(())
    }
}

/// A held part of a buffer, and what shows it and nothing else.
pub struct Part {
    /// The buffer.
    pub buffer: Arc<Buffer>,
    /// Where in it, in bytes.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
    blob: Mutex<Option<Arc<dyn Blob>>>,
    token: Mutex<Option<ShareToken>>,
}

impl Part {
    /// A part that the caller holds the buffer for.
    pub(super) fn of(buffer: Arc<Buffer>, offset: u64, size: u64) -> Part {
        Part { buffer, offset, size, blob: Mutex::default(), token: Mutex::default() }
    }

    /// All of a buffer that the caller holds.
    pub fn whole(buffer: Arc<Buffer>) -> Part {
        let size = buffer.size;
        Part::of(buffer, 0, size)
    }

    /// Another part over the same memory, held by itself. None if KFD has freed the buffer.
    pub(super) fn again(buffer: &Arc<Buffer>, offset: u64, size: u64) -> Option<Part> {
        buffer.hold().then(|| Part::of(Arc::clone(buffer), offset, size))
    }

    /// Whether anything but this process's own mapping shows it, or might.
    pub(super) fn is_exported(&self) -> bool {
        let exported = lock(&self.blob).is_some();
        exported || lock(&self.token).is_some()
    }

    /// What shows exactly this part.
    pub fn blob(&self, client: &Client) -> Outcome<Arc<dyn Blob>> {
        let mut place = lock(&self.blob);
        if let Some(blob) = &*place {
            return Ok(Arc::clone(blob));
        }
        let whole = self.offset == 0 && self.size == self.buffer.size;
        let blob_id = if whole { self.buffer.handle.0 } else { self.share(client)?.0 };
        let blob: Arc<dyn Blob> = Arc::from(client.host_blob(blob_id, self.size, self.buffer.visible)?);
        *place = Some(Arc::clone(&blob));
        Ok(blob)
    }

    /// Lets go of what shows it, unless others have that too. The next one is made when it is asked for.
    pub fn forget_blob(&self) {
        let mut place = lock(&self.blob);
        if place.as_ref().is_some_and(|blob| Arc::strong_count(blob) == 1) {
            *place = None;
        }
    }

    /// The secret by which other processes of this guest get it.
    pub(super) fn share(&self, client: &Client) -> Outcome<ShareToken> {
        let mut place = lock(&self.token);
        if let Some(token) = *place {
            return Ok(token);
        }
        let Part { offset, size, .. } = *self;
        let request = ShareMemoryRequest { handle: self.buffer.handle, offset, size };
        let (answer, _) = client.call::<ShareMemory>(&request, &[], 0)?;
        *place = Some(answer.token);
        Ok(answer.token)
    }

    /// Ends its token, of which a process can have only so many, though the buffer lives on. Who has the memory by then
    /// keeps it.
    pub(super) fn unshare(&self, client: &Client) {
        let Some(token) = lock(&self.token).take() else { return };
        // Else it ends with the buffer.
        let _ = client.call::<UnshareMemory>(&UnshareMemoryRequest { token }, &[], 0);
    }

    /// The same, if it was shared.
    pub(super) fn token(&self) -> Option<ShareToken> {
        *lock(&self.token)
    }
}
