//! The loop over the device's messages.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use kfd_ipc::worker::{Caching, ExportedMemory, FromWorker, ToWorker};
use kfd_ipc::{Channel, IpcError, MAX_MESSAGE_BYTES};
use nix::errno::Errno;
use thiserror::Error;
use virtio_kfd_protocol::Handle;
use virtio_kfd_protocol::frame::FrameError;
use virtio_kfd_protocol::limits::{CONTROL_RING, MAX_RINGS};

use crate::blob::BlobPiece;
use crate::context::Context;
use crate::dispatch::run_frame;
use crate::failure::Failure;
use crate::rings::{RingError, Rings, send};
use crate::start::{StartError, start};

/// Why the worker ends other than by the end of the channel.
#[derive(Debug, Error)]
pub enum ServeError {
    /// It could not start; the device was told.
    #[error("{0}")]
    Start(Box<StartError>),
    /// The channel is broken.
    #[error("{0}")]
    Ipc(#[from] IpcError),
    /// The device sent what it must not send.
    #[error("the device broke the protocol: {0}")]
    Device(String),
    /// A GPU could not be kept from memory that the guest took back. The end of this process does it.
    #[error("memory cannot be taken from the GPU, so this worker ends: {0}")]
    Memory(Failure),
}

impl From<FrameError> for ServeError {
    fn from(error: FrameError) -> Self {
        ServeError::Device(error.to_string())
    }
}

impl From<RingError> for ServeError {
    fn from(error: RingError) -> Self {
        ServeError::Device(error.to_string())
    }
}

/// Serves a context until the channel ends. The process must end when this returns: threads of rings may still
/// wait in the kernel.
pub fn serve(channel: Channel) -> Result<(), ServeError> {
    let channel = Arc::new(channel);
    let mut buffer = vec![0; MAX_MESSAGE_BYTES];
    let settings = match channel.receive::<ToWorker<'_>>(&mut buffer) {
        Ok((ToWorker::Start(settings), None)) => settings,
        Ok(_) => return Err(ServeError::Device("the first message is not Start".into())),
        Err(IpcError::Closed) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let context = match start(&settings) {
        Ok(context) => Arc::new(context),
        Err(error) => {
            channel.send(&FromWorker::Failed { message: error.to_string() }, None)?;
            return Err(ServeError::Start(Box::new(error)));
        }
    };
    let ready = FromWorker::Ready {
        kfd_major: context.version.major,
        kfd_minor: context.version.minor,
        gpu_count: u32::try_from(context.gpus.len()).unwrap_or(u32::MAX),
    };
    let mut server =
        Server { rings: Rings::new(context.clone(), channel.clone()), context, channel: channel.clone() };
    let served = server.tell(&ready).and_then(|()| {
        loop {
            let (message, descriptor) = channel.receive::<ToWorker<'_>>(&mut buffer)?;
            server.handle(message, descriptor)?;
        }
    });
    match served {
        Err(ServeError::Ipc(IpcError::Closed)) => Ok(()),
        other => other,
    }
}

struct Server {
    context: Arc<Context>,
    channel: Arc<Channel>,
    rings: Rings,
}

impl Server {
    fn tell(&self, message: &FromWorker<'_>) -> Result<(), ServeError> {
        Ok(self.channel.send(message, None)?)
    }

    fn handle(&mut self, message: ToWorker<'_>, descriptor: Option<OwnedFd>) -> Result<(), ServeError> {
        match message {
            ToWorker::Start(_) => Err(ServeError::Device("a second Start".into())),
            ToWorker::AddRegion { region, file_offset, size } => {
                let missing = || ServeError::Device(format!("AddRegion {region} without a file"));
                let file = descriptor.ok_or_else(missing)?;
                let added = self.context.memory().guest.add_region(region, file, file_offset, size);
                added.map_err(ServeError::Device)
            }
            ToWorker::RemoveRegion { region, ticket } => {
                let removed = self.context.memory().remove_region(&self.context.kfd, region);
                removed.map_err(ServeError::Memory)?;
                self.tell(&FromWorker::Done { ticket })
            }
            ToWorker::AttachBlob { resource, size, first_run, total_runs, runs } => {
                let piece = BlobPiece { resource, size, first_run, total_runs, runs };
                if let Err(failure) = self.context.memory().guest.attach(piece) {
                    self.context.throttle.log(|held| {
                        tracing::warn!("{failure} ({held} messages before were held back)");
                    });
                }
                Ok(())
            }
            ToWorker::DetachBlob { resource, ticket } => {
                let detached = self.context.memory().detach(&self.context.kfd, resource);
                detached.map_err(ServeError::Memory)?;
                self.tell(&FromWorker::Done { ticket })
            }
            ToWorker::Frame { ring: CONTROL_RING, ticket, bytes } => {
                let answer = run_frame(&self.context, CONTROL_RING, bytes)?;
                send(&self.channel, CONTROL_RING, ticket, &answer);
                Ok(())
            }
            ToWorker::Frame { ring, ticket, bytes } if u32::from(ring) < MAX_RINGS => {
                Ok(self.rings.push(ring, ticket, bytes)?)
            }
            ToWorker::Frame { ring, .. } => Err(ServeError::Device(format!("a frame on ring {ring}"))),
            ToWorker::Export { ticket, handle, size } => self.export(ticket, Handle(handle), size),
        }
    }

    /// Sends the render node's file with where in it the buffer lies. The file is the one whose address space this
    /// context acquired, so the kernel lets whoever holds it map the buffers of this context and no others.
    fn export(&self, ticket: u64, handle: Handle, size: u64) -> Result<(), ServeError> {
        let found = self.context.memory().export(handle, size);
        let exported = found.and_then(|(gpu_id, allocation, vram)| {
            let gpu = self.context.gpu(gpu_id).map_err(|_| Errno::ENODEV)?;
            // amdgpu maps VRAM write-combined and GTT cached (ttm caching of amdgpu_ttm_tt_create).
            let caching = if vram { Caching::WriteCombining } else { Caching::Cached };
            Ok((gpu, ExportedMemory { offset: allocation.mmap_offset, size, caching }))
        });
        let (message, file) = match exported {
            Ok((gpu, memory)) => (Ok(memory), Some(gpu.render.as_fd())),
            Err(errno) => (Err(errno as i32), None),
        };
        Ok(self.channel.send(&FromWorker::Exported { ticket, memory: message }, file)?)
    }
}
