//! A worker without KFD.
//!
//! Frames are answered by what is in them:
//! - `Nop` and `Hello` succeed; on ring [`HELD_RING`] only after a `Nop` on [`RELEASE_RING`].
//! - `WaitEvents` with a time-out waits for that too, on any ring.
//! - `SetEvent` with one of the event ids below misbehaves in that way.
//! - `AllocMemory` writes [`MARK`] into the guest memory of its blob at its offset.
//! - `AvailableMemory` answers with what the ledger says is in use, [`OWN_VRAM`] for each worker.
//! - `ShareMemory` shares a buffer of its own under a token, `FreeMemory` takes its tokens back, and `ImportMemory` answers with
//!   the first words of an attached blob in place of a handle.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

use kfd_ipc::ledger::{Counted, Ledger};
use kfd_ipc::worker::{Caching, ExportedMemory, FromWorker, Run, SharedPiece, ToWorker};
use kfd_ipc::{Channel, IPC_FD, MAX_MESSAGE_BYTES};
use rustix::fs::{MemfdFlags, memfd_create};
use virtio_kfd_protocol::calls::{AvailableMemory, Hello, ImportMemory, SetEvent, ShareMemory};
use virtio_kfd_protocol::frame::RawRequest;
use virtio_kfd_protocol::frame::{AnswerFrameBuilder, RequestFrame};
use virtio_kfd_protocol::{
    AvailableMemoryAnswer, Handle, HelloAnswer, ImportMemoryAnswer, Request, ShareMemoryAnswer, ShareToken,
    Status,
};

/// Frames on this ring wait.
pub const HELD_RING: u8 = 63;
/// For a frame on this ring.
pub const RELEASE_RING: u8 = 62;

/// The worker dies.
pub const DIE: u32 = 1;
/// The worker sends bytes that are no message.
pub const BABBLE: u32 = 2;
/// The worker answers a ticket that it does not have.
pub const WRONG_TICKET: u32 = 3;
/// The worker answers more than there is room for.
pub const LARGE_ANSWER: u32 = 4;
/// The worker closes its channel and goes on living.
pub const CLOSE: u32 = 5;

/// The worker says once more that it is ready.
pub const READY_AGAIN: u32 = 6;

/// Buffers by the index of their handle.
pub const GOOD_BUFFER: u32 = 1;
/// Export fails with ENOENT.
pub const NO_BUFFER: u32 = 2;
/// Export gives less than was asked for.
pub const SMALL_BUFFER: u32 = 3;
/// Export gives the guest's own memory.
pub const GUEST_RAM: u32 = 4;

/// Export waits for a frame on [`RELEASE_RING`].
pub const HELD_BUFFER: u32 = 5;
/// Export without a dma-buf, as old kernels do it.
pub const NO_DMABUF: u32 = 6;
/// Memory that no CPU can see.
pub const NO_CPU: u32 = 10;
/// ShareMemory under a number that is no token.
pub const NO_TOKEN: u32 = 7;
/// ShareMemory without a descriptor.
pub const NO_FILE: u32 = 8;
/// ShareMemory of the guest's own memory.
pub const SHARED_GUEST_RAM: u32 = 9;

/// A blob that the worker does not give back.
pub const KEPT_BLOB: u32 = 4242;

/// What each worker says that it uses.
pub const OWN_VRAM: u64 = 0x100_0000;

/// What is written into guest memory.
pub const MARK: &[u8; 16] = b"a worker's words";
/// What host memory begins with.
pub const HOST_TEXT: &[u8] = b"memory of the host";

/// Selector of a GPU that no host has.
pub const NO_GPU: &str = "no-such-gpu";
/// Selector at which the worker says that it cannot start.
pub const NO_KFD: &str = "no-kfd";
/// Selector at which the worker dies without a word.
pub const MUTE: &str = "mute";

#[derive(Default)]
struct Stub {
    regions: HashMap<u32, (File, u64)>,
    blobs: HashMap<u32, Vec<Run>>,
    held: Vec<(u8, u64, Vec<u8>)>,
    held_exports: Vec<(u64, u64, u64)>,
    refused: HashSet<u32>,
    /// Attached host memory: its dma-buf, offset, size.
    attached: HashMap<u32, (Option<File>, u64, u64)>,
    /// Tokens, by the buffer.
    tokens: Vec<(u64, u32)>,
    unshared: HashSet<u64>,
    ledger: Option<Ledger>,
}

pub fn run() {
    #[allow(unsafe_code)] // as the real worker does
    // SAFETY: the supervisor has put a channel there, and nothing in this process has used the number before.
    let channel = Channel::from(unsafe { OwnedFd::from_raw_fd(IPC_FD) });
    let mut stub = Stub::default();
    let mut buffer = vec![0; MAX_MESSAGE_BYTES];
    while let Ok((message, descriptors)) = channel.receive::<ToWorker<'_>>(&mut buffer) {
        stub.message(&channel, message, descriptors.into_iter().next());
    }
}

impl Stub {
    fn message(&mut self, channel: &Channel, message: ToWorker<'_>, descriptor: Option<OwnedFd>) {
        match message {
            ToWorker::Start(settings) => {
                self.ledger = descriptor.map(|file| Ledger::open(file).unwrap());
                if let Some(ledger) = &self.ledger {
                    assert_eq!(
                        ledger.of(settings.ledger_slot as usize, Counted::Vram),
                        0,
                        "a slot of a worker before"
                    );
                    ledger.set(settings.ledger_slot as usize, Counted::Vram, OWN_VRAM);
                }
                assert_eq!(std::env::vars().filter(|(name, _)| name != "VIRTIO_KFD_LOG").count(), 0);
                let gpu_count = match settings.gpus.first().map(String::as_str) {
                    Some(NO_KFD) => {
                        let message = "/dev/kfd: no such file".into();
                        let _ = channel.send(&FromWorker::Failed { message }, &[]);
                        return;
                    }
                    Some(MUTE) => std::process::exit(7),
                    Some(NO_GPU) => 0,
                    _ => 1,
                };
                reply(channel, &FromWorker::Ready { kfd_major: 1, kfd_minor: 17, gpu_count }, &[]);
            }
            ToWorker::AddRegion { region, file_offset, size } => {
                let file = File::from(descriptor.unwrap());
                assert!(file.metadata().unwrap().len() >= file_offset + size);
                self.regions.insert(region, (file, file_offset));
            }
            ToWorker::RemoveRegion { region, ticket } => {
                assert!(self.regions.remove(&region).is_some());
                reply(channel, &FromWorker::Done { ticket }, &[]);
            }
            ToWorker::AttachBlob { resource, size, first_run, total_runs, runs } => {
                self.refused.remove(&resource);
                let blob = self.blobs.entry(resource).or_default();
                assert_eq!(blob.len(), first_run as usize);
                blob.extend(runs);
                if blob.len() == total_runs as usize {
                    assert_eq!(blob.iter().map(|run| run.len).sum::<u64>(), size);
                }
            }
            // Kept for ever.
            ToWorker::DetachBlob { resource: KEPT_BLOB, .. } => {}
            ToWorker::DetachBlob { resource, ticket } => {
                assert!(self.blobs.remove(&resource).is_some());
                reply(channel, &FromWorker::Done { ticket }, &[]);
            }
            ToWorker::RefuseBlob { resource } => {
                self.refused.insert(resource);
            }
            ToWorker::AttachShared { resource, offset, size } => {
                let known = self.attached.insert(resource, (descriptor.map(File::from), offset, size));
                assert!(known.is_none());
            }
            ToWorker::DetachShared { resource } => drop(self.attached.remove(&resource)),
            ToWorker::ShareGone { token } => assert!(self.unshared.remove(&token)),
            ToWorker::Export { ticket, handle, size, .. } if Handle(handle).index() == HELD_BUFFER => {
                self.held_exports.push((ticket, handle, size));
            }
            ToWorker::Export { ticket, handle, size, .. } => self.export(channel, ticket, handle, size),
            ToWorker::Frame { ring, ticket, bytes } => {
                if ring == HELD_RING || waits(bytes) {
                    self.held.push((ring, ticket, bytes.to_vec()));
                    return;
                }
                self.frame(channel, ring, ticket, bytes);
                if ring == RELEASE_RING {
                    for (ring, ticket, bytes) in std::mem::take(&mut self.held) {
                        self.frame(channel, ring, ticket, &bytes);
                    }
                    for (ticket, handle, size) in std::mem::take(&mut self.held_exports) {
                        self.export(channel, ticket, handle, size);
                    }
                }
            }
        }
    }

    fn export(&self, channel: &Channel, ticket: u64, handle: u64, size: u64) {
        let (index, mut exported) = (Handle(handle).index(), size);
        let file = match index {
            NO_BUFFER => {
                reply(channel, &FromWorker::Exported { ticket, piece: Err(2) }, &[]);
                return;
            }
            GUEST_RAM => self.regions.values().next().unwrap().0.try_clone().unwrap(),
            _ => buffer(size),
        };
        if index == SMALL_BUFFER {
            exported -= 4096;
        }
        let memory = ExportedMemory { offset: 0, size: exported, caching: Caching::WriteCombining };
        let memory = (index != NO_CPU).then_some(memory);
        let piece = Ok(SharedPiece { offset: 0, size, handle, vram: size, memory });
        let files = [&file, &file];
        let count = if index == NO_DMABUF || index == NO_CPU { 1 } else { 2 };
        reply(channel, &FromWorker::Exported { ticket, piece }, &files[..count]);
    }

    fn frame(&mut self, channel: &Channel, ring: u8, ticket: u64, bytes: &[u8]) {
        let frame = RequestFrame::parse(bytes).unwrap();
        let mut answer = AnswerFrameBuilder::new(frame.header.version, frame.header.sequence);
        for raw in &frame.requests {
            match Request::decode(raw).unwrap() {
                Request::Hello { .. } => hello(&mut answer, raw),
                Request::SetEvent { fixed, .. } => match fixed.event_id.0 {
                    DIE => std::process::abort(),
                    BABBLE => channel.send(&vec![0xffu8; 64], &[]).unwrap(),
                    WRONG_TICKET => reply(channel, &FromWorker::Done { ticket: 999 }, &[]),
                    LARGE_ANSWER => {
                        let bytes = vec![0; frame.header.answer_capacity as usize + 8];
                        reply(channel, &FromWorker::Answer { ring, ticket, bytes: &bytes }, &[]);
                    }
                    READY_AGAIN => {
                        reply(channel, &FromWorker::Ready { kfd_major: 1, kfd_minor: 17, gpu_count: 1 }, &[]);
                    }
                    CLOSE => {
                        channel.shut_down();
                        loop {
                            std::thread::park();
                        }
                    }
                    _ => answer.push::<SetEvent>(&raw.header, &Default::default(), &[]),
                },
                Request::AllocMemory { fixed, .. } => {
                    let status = match self.blobs.get(&fixed.resource.0) {
                        _ if self.refused.contains(&fixed.resource.0) => Status::LIMIT,
                        Some(runs) if self.mark(runs, fixed.resource_offset) => Status::OK,
                        _ => Status::BAD_RESOURCE,
                    };
                    answer.push_status(raw.header.opcode, status, 0);
                }
                Request::AvailableMemory { .. } => {
                    let available = self.ledger.as_ref().unwrap().sum(Counted::Vram);
                    answer.push::<AvailableMemory>(&raw.header, &AvailableMemoryAnswer { available }, &[]);
                }
                Request::ShareMemory { fixed, .. } => {
                    let token = self.share(channel, fixed.handle, fixed.offset, fixed.size);
                    answer.push::<ShareMemory>(&raw.header, &ShareMemoryAnswer { token }, &[]);
                }
                Request::FreeMemory { fixed, .. } => {
                    let index = fixed.handle.index();
                    for (token, _) in self.tokens.extract_if(.., |(_, buffer)| *buffer == index) {
                        self.unshared.insert(token);
                        reply(channel, &FromWorker::Unshare { token }, &[]);
                    }
                    answer.push_status(raw.header.opcode, Status::OK, 0);
                }
                Request::ImportMemory { fixed, .. } => match self.attached.get(&fixed.resource.0) {
                    Some((Some(dmabuf), offset, size)) => {
                        let mut words = [0; 8];
                        dmabuf.read_exact_at(&mut words, *offset).unwrap();
                        let handle = Handle(u64::from_le_bytes(words));
                        let fixed = ImportMemoryAnswer { handle, size: *size };
                        answer.push::<ImportMemory>(&raw.header, &fixed, &[]);
                    }
                    Some(_) => answer.push_status(raw.header.opcode, Status::NOT_SUPPORTED, 0),
                    None => answer.push_status(raw.header.opcode, Status::BAD_RESOURCE, 0),
                },
                _ => answer.push_status(raw.header.opcode, Status::OK, 0),
            }
        }
        let bytes = answer.finish();
        reply(channel, &FromWorker::Answer { ring, ticket, bytes: &bytes }, &[]);
    }

    fn share(&mut self, channel: &Channel, handle: Handle, offset: u64, size: u64) -> ShareToken {
        let index = handle.index();
        // No two workers give out the same.
        let number = u64::from(std::process::id()) << 32 | self.tokens.len() as u64;
        let token = ShareToken(if index == NO_TOKEN { number } else { number | ShareToken::BIT });
        self.tokens.push((token.0, index));
        let file = match index {
            SHARED_GUEST_RAM => self.regions.values().next().unwrap().0.try_clone().unwrap(),
            _ => buffer(offset + size),
        };
        let memory = ExportedMemory { offset, size, caching: Caching::WriteCombining };
        let piece = SharedPiece { offset, size, handle: handle.0, vram: size, memory: Some(memory) };
        let files = [&file, &file];
        let count = if index == NO_FILE { 0 } else { 2 };
        reply(channel, &FromWorker::Share { token: token.0, piece }, &files[..count]);
        token
    }

    /// `false` where its region is gone.
    fn mark(&self, runs: &[Run], offset: u64) -> bool {
        let mut start = 0;
        for run in runs {
            if offset < start + run.len {
                let Some((file, file_offset)) = self.regions.get(&run.region) else { return false };
                file.write_all_at(MARK, file_offset + run.offset + offset - start).unwrap();
                return true;
            }
            start += run.len;
        }
        panic!("offset {offset} is not in the blob");
    }
}

/// Memory that begins with [`HOST_TEXT`] and has the number of each page in its first word from the second on.
fn buffer(size: u64) -> File {
    let file = File::from(memfd_create("buffer", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(size).unwrap();
    file.write_all_at(HOST_TEXT, 0).unwrap();
    for page in 1..size / 4096 {
        file.write_all_at(&page.to_le_bytes(), page * 4096).unwrap();
    }
    file
}

/// Whether a frame waits for an event.
fn waits(bytes: &[u8]) -> bool {
    let frame = RequestFrame::parse(bytes).unwrap();
    frame.requests.iter().any(
        |raw| matches!(Request::decode(raw), Ok(Request::WaitEvents { fixed, .. }) if fixed.timeout != 0),
    )
}

fn hello(answer: &mut AnswerFrameBuilder, raw: &RawRequest<'_>) {
    let fixed = HelloAnswer { version: 1, kfd_major: 1, kfd_minor: 17, gpu_count: 1, features: 0 };
    answer.push::<Hello>(&raw.header, &fixed, &[]);
}

/// The device may have ended this worker meanwhile.
fn reply(channel: &Channel, message: &FromWorker<'_>, files: &[&File]) {
    let files: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
    let _ = channel.send(message, &files);
}
