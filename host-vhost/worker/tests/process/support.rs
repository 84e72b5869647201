//! Starts the worker and drives it as the device does.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use kfd_ipc::worker::{FromWorker, Run, Settings, SharedPiece, ToWorker};
use kfd_ipc::{Channel, IpcError, MAX_MESSAGE_BYTES};
use virtio_kfd_protocol::calls::{AcquireVm, GetApertures, Hello};
use virtio_kfd_protocol::frame::{
    AnswerArea, AnswerFrame, AnswerHeader, CallError, RawAnswer, RequestFrameBuilder,
};
use virtio_kfd_protocol::{
    CallType, GpuId, GpuRequest, HelloAnswer, HelloRequest, Nothing, ResourceId, Status,
};

/// The wire version of these tests.
pub const VERSION: u32 = 1;

/// `KFD_IOC_ALLOC_MEM_FLAGS_*` (linux/kfd_ioctl.h).
pub mod memory {
    pub const VRAM: u32 = 1;
    pub const GTT: u32 = 1 << 1;
    pub const USERPTR: u32 = 1 << 2;
    pub const DOORBELL: u32 = 1 << 3;
    pub const MMIO_REMAP: u32 = 1 << 4;
    pub const PUBLIC: u32 = 1 << 29;
    pub const WRITABLE: u32 = 1 << 31;
}

/// The KFD model as a preload library, built here: the worker's package does not depend on it.
fn model() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let package = std::env::var_os("CARGO_MANIFEST_DIR")
            .map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
        let test = std::env::current_exe().unwrap();
        let profile = test.parent().and_then(Path::parent).unwrap();
        let mut build = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
        build.args(["build", "--quiet", "--offline", "--lib", "--manifest-path"]);
        build.arg(package.join("../kfd-model/preload/Cargo.toml"));
        build.arg("--target-dir").arg(profile.parent().unwrap());
        if profile.ends_with("release") {
            build.arg("--release");
        }
        assert!(build.status().unwrap().success(), "{build:?}");
        profile.join("libkfd_model_preload.so")
    })
}

/// The command that starts the program, and the channel to it.
pub fn command(profile: Option<&str>) -> (Channel, Command) {
    let (ours, theirs) = Channel::pair().unwrap();
    // The shell puts the channel where the worker looks for it.
    let mut command = Command::new("/bin/sh");
    command.args(["-c", "exec \"$0\" 3<&0 0</dev/null"]).arg(env!("CARGO_BIN_EXE_kfd-worker"));
    command.stdin(theirs.as_fd().try_clone_to_owned().unwrap()).env("VIRTIO_KFD_LOG", "debug");
    if let Some(profile) = profile {
        command.env("LD_PRELOAD", model()).env("VIRTIO_KFD_MODEL", profile);
    }
    (ours, command)
}

/// Settings that bound nothing that a test does not mean to reach.
pub fn settings() -> Settings {
    Settings { max_buffers: 1000, max_queues: 100, max_runs: 1000, name: "test".into(), ..Default::default() }
}

/// A worker on a model, whose first GPU's address space is acquired.
pub fn on_gpu(profile: &str, settings: Settings) -> (Worker, GpuId) {
    let mut worker = Worker::greeted(profile, settings);
    let gpu_id = worker.acquire();
    (worker, gpu_id)
}

/// A running worker.
pub struct Worker {
    /// `None` where somebody else waits for it.
    child: Option<Child>,
    channel: Option<Channel>,
    buffer: Vec<u8>,
    tickets: u64,
    kept: Vec<Answer>,
}

/// An answer frame as it came.
pub struct Answer {
    pub ring: u8,
    pub ticket: u64,
    bytes: Vec<u8>,
}

/// A message other than an answer, without borrowed parts.
#[derive(Debug, PartialEq, Eq)]
pub enum Other {
    Ready { kfd: (u32, u32), gpu_count: u32 },
    Failed(String),
    Done(u64),
    Exported { ticket: u64, piece: Result<SharedPiece, i32> },
    Share { token: u64, piece: SharedPiece },
    Unshare(u64),
}

/// What a worker says.
pub enum Said {
    Answer(Answer),
    Other(Other, Vec<OwnedFd>),
}

impl Worker {
    /// Starts the program, on a model or on whatever this machine has.
    pub fn spawn(profile: Option<&str>) -> Self {
        let (channel, mut command) = command(profile);
        let child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut worker = Self::over(channel);
        worker.child = Some(child);
        worker
    }

    /// Drives a worker that somebody else has started.
    pub fn over(channel: Channel) -> Self {
        Worker {
            child: None,
            channel: Some(channel),
            buffer: vec![0; MAX_MESSAGE_BYTES],
            tickets: 0,
            kept: Vec::new(),
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }

    /// Starts it on a model and waits until it is ready.
    pub fn ready(profile: &str, settings: Settings) -> Self {
        let mut worker = Self::spawn(Some(profile));
        worker.start(settings);
        worker
    }

    /// Sends the settings and waits until it is ready.
    pub fn start(&mut self, settings: Settings) {
        self.start_with(settings, None);
    }

    /// The same, with the ledger of a VM.
    pub fn start_with(&mut self, settings: Settings, ledger: Option<&File>) {
        self.send(&ToWorker::Start(settings), ledger);
        match self.other() {
            (Other::Ready { .. }, files) if files.is_empty() => {}
            (other, _) => panic!("{other:?}\n{}", self.log()),
        }
    }

    /// As [`Worker::ready`], with the handshake done.
    pub fn greeted(profile: &str, settings: Settings) -> Self {
        let mut worker = Self::ready(profile, settings);
        worker.hello().unwrap();
        worker
    }

    /// Acquires the address space of the first GPU.
    pub fn acquire(&mut self) -> GpuId {
        let (_, apertures) = self.call::<GetApertures>(&Nothing {}, &[]).unwrap();
        let gpu_id = apertures[0].gpu_id;
        self.call::<AcquireVm>(&GpuRequest { gpu_id, pad: 0 }, &[]).unwrap();
        gpu_id
    }

    pub fn send(&self, message: &ToWorker<'_>, file: Option<&File>) {
        self.try_send(message, file).unwrap();
    }

    pub fn try_send(&self, message: &ToWorker<'_>, file: Option<&File>) -> Result<(), IpcError> {
        let files: Vec<BorrowedFd<'_>> = file.iter().map(AsFd::as_fd).collect();
        self.channel.as_ref().unwrap().send(message, &files)
    }

    /// The next message; the worker's log where the channel is closed instead.
    pub fn receive(&mut self) -> Said {
        match self.channel.as_ref().unwrap().receive::<FromWorker<'_>>(&mut self.buffer) {
            Ok((FromWorker::Answer { ring, ticket, bytes }, files)) if files.is_empty() => {
                Said::Answer(Answer { ring, ticket, bytes: bytes.to_vec() })
            }
            Ok((message, files)) => {
                let other = match message {
                    FromWorker::Ready { kfd_major, kfd_minor, gpu_count } => {
                        Other::Ready { kfd: (kfd_major, kfd_minor), gpu_count }
                    }
                    FromWorker::Failed { message } => Other::Failed(message),
                    FromWorker::Done { ticket } => Other::Done(ticket),
                    FromWorker::Exported { ticket, piece } => Other::Exported { ticket, piece },
                    FromWorker::Share { token, piece } => Other::Share { token, piece },
                    FromWorker::Unshare { token } => Other::Unshare(token),
                    FromWorker::Answer { .. } => panic!("an answer with a descriptor"),
                };
                Said::Other(other, files)
            }
            Err(error) => panic!("{error}\n{}", self.log()),
        }
    }

    pub fn other(&mut self) -> (Other, Vec<OwnedFd>) {
        match self.receive() {
            Said::Other(other, files) => (other, files),
            Said::Answer(answer) => panic!("an answer on ring {}", answer.ring),
        }
    }

    /// The next answer on a ring; those on others are kept.
    pub fn answer(&mut self, ring: u8) -> Answer {
        if let Some(index) = self.kept.iter().position(|answer| answer.ring == ring) {
            return self.kept.remove(index);
        }
        loop {
            match self.receive() {
                Said::Answer(answer) if answer.ring == ring => return answer,
                Said::Answer(answer) => self.kept.push(answer),
                Said::Other(other, _) => panic!("{other:?}"),
            }
        }
    }

    pub fn ticket(&mut self) -> u64 {
        self.tickets += 1;
        self.tickets
    }

    /// Sends a frame; returns its ticket.
    pub fn frame(&mut self, ring: u8, frame: RequestFrameBuilder) -> u64 {
        let ticket = self.ticket();
        self.send(&ToWorker::Frame { ring, ticket, bytes: &frame.finish() }, None);
        ticket
    }

    /// One call on the control ring.
    pub fn call<C: CallType>(
        &mut self,
        request: &C::Request,
        tail: &[C::RequestTail],
    ) -> Result<(C::Answer, Vec<C::AnswerTail>), CallError> {
        let mut frame = frame(VERSION);
        frame.push::<C>(request, tail, elements::<C>()).unwrap();
        let ticket = self.frame(0, frame);
        let answer = self.answer(0);
        assert_eq!(answer.ticket, ticket);
        answer.decode::<C>(0)
    }

    /// The status of a call that is expected to fail.
    pub fn failure<C: CallType>(&mut self, request: &C::Request, tail: &[C::RequestTail]) -> (Status, u32) {
        match self.call::<C>(request, tail) {
            Err(CallError::Failed { status, errno, .. }) => (status, errno),
            Err(error) => panic!("{error}"),
            Ok(_) => (Status::OK, 0),
        }
    }

    pub fn hello(&mut self) -> Result<HelloAnswer, CallError> {
        let request =
            HelloRequest { version_min: VERSION, version_max: VERSION, features: 3, ..Default::default() };
        let mut frame = frame(0);
        frame.push::<Hello>(&request, &[], 0).unwrap();
        self.frame(0, frame);
        self.answer(0).decode::<Hello>(0).map(|(answer, _)| answer)
    }

    /// Gives a region of guest memory and a blob over pages of it, in that order.
    pub fn guest_memory(&mut self, file: &File, pages: u64, resource: u32, blob: &[u64]) {
        self.send(&ToWorker::AddRegion { region: resource, file_offset: 0, size: pages * 4096 }, Some(file));
        let runs: Vec<Run> =
            blob.iter().map(|page| Run { region: resource, offset: page * 4096, len: 4096 }).collect();
        let (size, total_runs) = (runs.len() as u64 * 4096, runs.len() as u32);
        self.send(&ToWorker::AttachBlob { resource, size, first_run: 0, total_runs, runs }, None);
    }

    /// Closes the channel and waits for the end; status and log.
    pub fn end(mut self) -> (i32, String) {
        self.channel = None;
        self.wait()
    }

    /// Waits for an end that comes by itself; the exit status, or the signal as a negative number, and the log.
    pub fn wait(&mut self) -> (i32, String) {
        let log = self.log();
        let status = self.child.as_mut().unwrap().wait().unwrap();
        (status.code().unwrap_or_else(|| -status.signal().unwrap()), log)
    }

    /// The log, up to the end of the worker.
    fn log(&mut self) -> String {
        let mut text = String::new();
        if let Some(mut stderr) = self.child.as_mut().and_then(|child| child.stderr.take()) {
            stderr.read_to_string(&mut text).unwrap();
        }
        text
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            // A worker that has ended and was waited for is left alone by both.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Answer {
    /// The records of the frame.
    pub fn parse(&self) -> Vec<RawAnswer<'_>> {
        AnswerFrame::parse(&self.bytes).unwrap().answers
    }

    pub fn headers(&self) -> Vec<AnswerHeader> {
        self.parse().iter().map(|answer| answer.header).collect()
    }

    pub fn statuses(&self) -> Vec<Status> {
        self.headers().iter().map(|header| header.status).collect()
    }

    pub fn decode<C: CallType>(&self, index: usize) -> Result<(C::Answer, Vec<C::AnswerTail>), CallError> {
        self.parse()[index].decode::<C>()
    }
}

/// A frame whose answers have room for the largest.
pub fn frame(version: u32) -> RequestFrameBuilder {
    let area = AnswerArea { resource: ResourceId(1), offset: 0, capacity: 128 * 1024 };
    RequestFrameBuilder::new(version, 7, area)
}

/// Answer elements to ask for: all that fit in a frame beside others.
fn elements<C: CallType>() -> usize {
    C::ANSWER_TAIL_MAX.min(1024 * 64 / size_of::<C::AnswerTail>())
}
