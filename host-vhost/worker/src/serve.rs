//! The loop over the device's messages.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use kfd_ipc::worker::{FromWorker, ToWorker};
use kfd_ipc::{Channel, IpcError, MAX_MESSAGE_BYTES};
use thiserror::Error;
use virtio_kfd_protocol::frame::FrameError;
use virtio_kfd_protocol::limits::{CONTROL_RING, MAX_RINGS};
use virtio_kfd_protocol::{Handle, ShareToken};

use crate::blob::BlobPiece;
use crate::context::Context;
use crate::dispatch::run_frame;
use crate::failure::Failure;
use crate::rings::{RingError, Rings, send};
use crate::share::Dmabuf;
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
    let (settings, ledger) = match channel.receive::<ToWorker<'_>>(&mut buffer) {
        Ok((ToWorker::Start(settings), descriptors)) => (settings, descriptors.into_iter().next()),
        Ok(_) => return Err(ServeError::Device("the first message is not Start".into())),
        Err(IpcError::Closed) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let context = match start(&settings, ledger, channel.clone()) {
        Ok(context) => context.share_threads(),
        Err(error) => {
            channel.send(&FromWorker::Failed { message: error.to_string() }, &[])?;
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
            let (message, descriptors) = channel.receive::<ToWorker<'_>>(&mut buffer)?;
            server.handle(message, descriptors)?;
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
        Ok(self.channel.send(message, &[])?)
    }

    fn handle(&mut self, message: ToWorker<'_>, descriptors: Vec<OwnedFd>) -> Result<(), ServeError> {
        let descriptor = descriptors.into_iter().next();
        match message {
            ToWorker::Start(_) => Err(ServeError::Device("a second Start".into())),
            ToWorker::AddRegion { region, file_offset, size } => {
                let missing = || ServeError::Device(format!("AddRegion {region} without a file"));
                let file = descriptor.ok_or_else(missing)?;
                let added = self.context.memory().guest.add_region(region, file, file_offset, size);
                added.map_err(ServeError::Device)
            }
            ToWorker::RemoveRegion { region, ticket } => {
                let removed = self.context.memory().remove_region(&self.context, region);
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
                let detached = self.context.memory().detach(&self.context, resource);
                detached.map_err(ServeError::Memory)?;
                self.tell(&FromWorker::Done { ticket })
            }
            ToWorker::RefuseBlob { resource } => {
                self.context.memory().guest.refuse(resource);
                Ok(())
            }
            ToWorker::AttachShared { resource, offset, size } => {
                let attached = self.context.memory().attach_shared(resource, offset, size, descriptor);
                attached.map_err(ServeError::Device)
            }
            ToWorker::DetachShared { resource } => {
                let detached = self.context.memory().detach_shared(&self.context, resource);
                detached.map_err(ServeError::Memory)
            }
            ToWorker::ShareGone { token } => {
                self.context.memory().share_gone(ShareToken(token));
                Ok(())
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
            ToWorker::Export { ticket, resource, handle, size } => {
                self.export(ticket, resource, Handle(handle), size)
            }
        }
    }

    /// Sends where a buffer lies in the file of a render node, and the buffer as a dma-buf.
    fn export(&self, ticket: u64, resource: u32, handle: Handle, size: u64) -> Result<(), ServeError> {
        let exported = self.context.memory().export(&self.context, resource, handle, size);
        let exported = match exported {
            Ok(exported) => exported,
            Err(errno) => return self.tell(&FromWorker::Exported { ticket, piece: Err(errno as i32) }),
        };
        let dmabuf = exported.dmabuf.as_ref().map(Dmabuf::as_fd);
        let descriptors: Vec<BorrowedFd<'_>> = exported.file.into_iter().chain(dmabuf).collect();
        let message = FromWorker::Exported { ticket, piece: Ok(exported.piece) };
        Ok(self.channel.send(&message, &descriptors)?)
    }
}
