//! A host made of closures: it gets parsed frames and says what happens to them.
#![allow(unsafe_code)] // mmap, for the blobs

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use nix::sys::memfd::{MFdFlags, memfd_create};
use virtio_kfd_protocol::frame::{AnswerFrameBuilder, RawRequest, RequestFrame};
use virtio_kfd_protocol::{
    Call, Capset, Features, GuestVa, HelloAnswer, Nothing, Request, ResourceId, Status, calls,
};

use crate::transport::{Blob, Result, Transport, TransportError};

/// What becomes of a frame.
pub(crate) enum Fate {
    /// The fence completes with this answer.
    Answer(Vec<u8>),
    /// The fence completes and nothing was written.
    Silence,
    /// The transport says that the connection is lost.
    Gone,
    /// The frame cannot be sent, the connection stays.
    NotSent,
}

type Behaviour = dyn Fn(u8, &RequestFrame<'_>) -> Fate + Send + Sync;

pub(crate) struct FakeHost {
    capset: Capset,
    blobs: Arc<Mutex<HashMap<u32, Arc<File>>>>,
    /// Bytes that are left of it.
    window: Arc<Mutex<u64>>,
    behaviour: Box<Behaviour>,
}

/// The answer that a host without faults gives to handshakes and Nops.
pub(crate) fn answer(frame: &RequestFrame<'_>) -> Vec<u8> {
    answer_with(frame, |request, answer| {
        match request.header.opcode {
            opcode if opcode == Call::Nop.opcode() => {
                answer.push::<calls::Nop>(&request.header, &Nothing {}, &[]);
            }
            opcode => answer.push_status(opcode, Status::NOT_IMPLEMENTED, 0),
        };
    })
}

/// The same for handshakes; the rest is the closure's.
pub(crate) fn answer_with(
    frame: &RequestFrame<'_>,
    mut rest: impl FnMut(&RawRequest<'_>, &mut AnswerFrameBuilder),
) -> Vec<u8> {
    let mut answer = AnswerFrameBuilder::new(1, frame.header.sequence);
    for request in &frame.requests {
        match Request::decode(request) {
            Ok(Request::Hello { fixed, .. }) => {
                assert_eq!(frame.header.version, 0, "no version is agreed on before the handshake");
                let hello = HelloAnswer {
                    version: 1,
                    kfd_major: 1,
                    kfd_minor: 17,
                    gpu_count: 1,
                    // One more than was asked for, as a newer host might.
                    features: fixed.features | 1 << 40,
                };
                answer.push::<calls::Hello>(&request.header, &hello, &[]);
            }
            Ok(_) => rest(request, &mut answer),
            Err(error) => answer.push_status(request.header.opcode, error.status(), 0),
        }
    }
    answer.finish()
}

impl FakeHost {
    pub(crate) fn new(behaviour: impl Fn(u8, &RequestFrame<'_>) -> Fate + Send + Sync + 'static) -> FakeHost {
        FakeHost {
            capset: Capset::announce(Features::GUEST_MEMORY, 1),
            blobs: Arc::default(),
            window: Arc::default(),
            behaviour: Box::new(behaviour),
        }
    }

    pub(crate) fn with_capset(capset: Capset) -> FakeHost {
        FakeHost { capset, ..FakeHost::new(|_, frame| Fate::Answer(answer(frame))) }
    }

    /// The same with a window of so many bytes.
    pub(crate) fn with_window(self, bytes: u64) -> FakeHost {
        let features = Features::GUEST_MEMORY | Features::HOST_BLOBS;
        FakeHost { capset: Capset::announce(features, 1), window: Arc::new(Mutex::new(bytes)), ..self }
    }

    /// Bytes of the window that are free.
    pub(crate) fn window(&self) -> Arc<Mutex<u64>> {
        Arc::clone(&self.window)
    }

    fn blob(&self, size: u64) -> FakeBlob {
        let file = File::from(memfd_create(c"blob", MFdFlags::MFD_CLOEXEC).unwrap());
        file.set_len(size).unwrap();
        let file = Arc::new(file);
        let mut blobs = self.blobs.lock().unwrap();
        let resource = blobs.keys().max().map_or(1, |last| last + 1);
        blobs.insert(resource, Arc::clone(&file));
        FakeBlob { resource, size, file, blobs: Arc::clone(&self.blobs), window: None }
    }

    /// Blobs that exist now.
    pub(crate) fn blobs(&self) -> Arc<Mutex<HashMap<u32, Arc<File>>>> {
        Arc::clone(&self.blobs)
    }
}

impl Transport for FakeHost {
    fn capset(&self) -> &Capset {
        &self.capset
    }

    fn submit_and_wait(&self, ring: u8, frame: &[u8], _limit: Duration) -> Result<()> {
        let frame = RequestFrame::parse(frame).expect("the client sends well-formed frames");
        match (self.behaviour)(ring, &frame) {
            Fate::Answer(bytes) => {
                let blob = self.blobs.lock().unwrap().get(&frame.header.answer_resource.0).cloned();
                assert!(bytes.len() <= frame.header.answer_capacity as usize);
                blob.expect("a blob of the client").write_all_at(&bytes, frame.header.answer_offset).unwrap();
                Ok(())
            }
            Fate::Silence => Ok(()),
            Fate::Gone => Err(TransportError::Lost("the test ended it".into())),
            Fate::NotSent => Err(TransportError::NotSupported("the test refused it")),
        }
    }

    fn guest_blob(&self, size: u64) -> Result<Box<dyn Blob>> {
        Ok(Box::new(self.blob(size)))
    }

    fn host_memory(&self, blob_id: u64, size: u64, _mappable: bool) -> Result<Box<dyn Blob>> {
        if self.capset.features & Features::HOST_BLOBS.bits() == 0 {
            return Err(TransportError::NotSupported("host memory in this test"));
        }
        let mut left = self.window.lock().unwrap();
        let error = std::io::Error::from_raw_os_error(libc::ENOSPC);
        *left = left.checked_sub(size).ok_or(TransportError::System {
            call: "RESOURCE_CREATE_BLOB",
            detail: format!("buffer {blob_id:#x}"),
            error,
        })?;
        drop(left);
        let mut blob = self.blob(size);
        blob.window = Some(Arc::clone(&self.window));
        Ok(Box::new(blob))
    }

    fn import(&self, dma_buf: BorrowedFd<'_>) -> Result<Box<dyn Blob>> {
        let inode = nix::sys::stat::fstat(dma_buf).unwrap().st_ino;
        let blobs = self.blobs.lock().unwrap();
        let found = blobs.iter().find(|(_, file)| file.metadata().unwrap().ino() == inode);
        let (resource, file) = found.ok_or(TransportError::NotSupported("a foreign dma-buf in this test"))?;
        let size = file.metadata().unwrap().len();
        let (file, blobs) = (Arc::clone(file), Arc::default());
        Ok(Box::new(FakeBlob { resource: *resource, size, file, blobs, window: None }))
    }

    fn device(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn abandon(&self) {}
}

struct FakeBlob {
    resource: u32,
    size: u64,
    file: Arc<File>,
    blobs: Arc<Mutex<HashMap<u32, Arc<File>>>>,
    /// To give its place back.
    window: Option<Arc<Mutex<u64>>>,
}

impl Blob for FakeBlob {
    fn resource(&self) -> ResourceId {
        ResourceId(self.resource)
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn map_fixed(&self, address: GuestVa, length: u64, protection: i32) -> Result<()> {
        assert!(length <= self.size);
        // SAFETY: the client has reserved the range.
        let mapped = unsafe {
            libc::mmap(
                std::ptr::with_exposed_provenance_mut(address.0 as usize),
                length as usize,
                protection,
                libc::MAP_SHARED | libc::MAP_FIXED,
                self.file.as_raw_fd(),
                0,
            )
        };
        assert_ne!(mapped, libc::MAP_FAILED);
        Ok(())
    }

    fn export(&self) -> Result<OwnedFd> {
        Ok(self.file.try_clone().unwrap().into())
    }

    fn mmap_offset(&self) -> Result<u64> {
        Ok(0)
    }

    fn close_handle(self: Box<Self>) -> Box<dyn std::any::Any + Send + Sync> {
        self
    }
}

impl Drop for FakeBlob {
    fn drop(&mut self) {
        self.blobs.lock().unwrap().remove(&self.resource);
        if let Some(window) = &self.window {
            *window.lock().unwrap() += self.size;
        }
    }
}
