//! What processes of one loop-back VM share: memory of the GPU by handles, as HIP passes it on; and what is each one's own.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

use std::fs::File;
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use guest_thunk::client::Client;
use guest_thunk::transport::loopback::SharedContext;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
    SocketType, connect, sendmsg, socket_with, socketpair,
};
use virtio_kfd_protocol::calls::*;
use virtio_kfd_protocol::{AllocMemoryRequest, GpuRequest, Nothing};
use virtio_kfd_tests::gpu_program::{Optimisation, Release};
use virtio_kfd_tests::native::{LOOPBACK_VARIABLE, run, text};
use virtio_kfd_tests::parts::package_path;
use virtio_kfd_tests::transcript::assert_same_lines;
use virtio_kfd_tests::{Artifacts, Daemon, GpuPrograms, SharedVm, Under, need};

const GPU: &str = "gfx906";
const SOON: Duration = Duration::from_secs(60);
const LIMIT: Duration = Duration::from_secs(300);

/// A daemon and the one VM that it serves.
struct Stack {
    artifacts: Artifacts,
    vm: SharedVm,
    daemon: Daemon,
    _directory: tempfile::TempDir,
}

impl Stack {
    fn start() -> anyhow::Result<Stack> {
        let artifacts = Artifacts::for_daemon(&["kfd-loopback-vm", "kfd-hostile"], &[])?;
        let daemon = Daemon::start(&artifacts, &format!("model:{GPU}"), &[]).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let vm = SharedVm::start(&artifacts, daemon.socket(), directory.path(), LIMIT * 4).unwrap();
        Ok(Stack { artifacts, vm, daemon, _directory: directory })
    }

    fn report(&self) -> String {
        format!("{}\n{}", self.vm.report(), self.daemon.report())
    }

    fn client(&self) -> Client {
        Client::over(Box::new(SharedContext::connect(self.vm.socket()).unwrap().unwrap())).unwrap()
    }

    /// How many threads the VM's process has.
    fn threads(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/task", self.vm.pid())).unwrap().count()
    }
}

/// By which ROCr 6.4 takes the way that a kernel without AMD's additions has (dma-bufs); ROCr 7.2 knows no other.
const WAY: (&str, &str) = ("HSA_ENABLE_IPC_MODE_LEGACY", "0");

/// Memory of one HIP process in another one by hipIpcGetMemHandle: the same lines as natively on the model. Cases C17 and C22.
#[test]
fn handles_of_hip_are_the_same_memory_in_another_process() {
    let stack = need!(Stack::start());
    need!(stack.artifacts.program("libkfd_preload.so"));
    for release in Release::INSIDE {
        let programs = match GpuPrograms::find(&stack.artifacts, release) {
            Ok(programs) => programs,
            Err(error) => {
                println!("SKIP: package set {}: {error:#}", release.set());
                continue;
            }
        };
        let program = programs.hip(&package_path("tests/sharing/ipc.hip"), GPU, Optimisation::Full).unwrap();
        let under = |under: &Under<'_>| {
            let mut command = under.command(&programs.runtime(), &program).unwrap();
            command.env(WAY.0, WAY.1).stderr(Stdio::null());
            command
        };
        let native = text(under(&Under::model(&stack.artifacts, GPU).unwrap()), LIMIT).unwrap();
        let ours = Under::seam(&stack.artifacts, stack.vm.socket()).unwrap();
        let ours = text(under(&ours), LIMIT).unwrap_or_else(|error| panic!("{error:#}\n{}", stack.report()));
        assert!(
            native.contains("\nmaker: words that a kernel of the other process wrote wrong: 0\n"),
            "{native}"
        );
        assert!(native.ends_with("\nthe other process ended with 0\n"), "{native}");
        assert_same_lines(release.set(), ("native", "on one VM"), &native, &ours);
        println!("{}: {} lines\n{ours}", release.set(), ours.lines().count());
        // Events lie in memory of the application, which HIP has GPUs see: docs/limits.md.
        let event = |of: &Under<'_>| {
            let mut command = under(of);
            command.arg("event");
            text(command, LIMIT).unwrap()
        };
        assert_eq!(
            [
                event(&Under::model(&stack.artifacts, GPU).unwrap()),
                event(&Under::seam(&stack.artifacts, stack.vm.socket()).unwrap())
            ],
            ["a handle of an event: hipSuccess\n", "a handle of an event: hipErrorInvalidValue\n"]
        );
        stack.daemon.wait_for_workers(0, SOON).unwrap();
    }
}

/// What the program prints with ROCr 6.1 on the guest library. Natively this runtime needs AMD's own kernel module, which the
/// model is not: the expected lines are those of the newer runtimes, but where the runtime itself differs.
#[test]
fn handles_of_hip_on_the_guest_library() {
    let stack = need!(Stack::start());
    let programs = need!(GpuPrograms::find(&stack.artifacts, Release::Trixie));
    let under = need!(Under::loopback(&stack.artifacts, stack.vm.socket()));
    let program = programs.hip(&package_path("tests/sharing/ipc.hip"), GPU, Optimisation::Full).unwrap();
    let mut command = under.command(&programs.runtime(), &program).unwrap();
    command.stderr(Stdio::null());
    let ours = text(command, LIMIT).unwrap_or_else(|error| panic!("{error:#}\n{}", stack.report()));
    println!("{ours}");
    for line in [
        "maker: 2097152 of 4194304 bytes",
        "user: views 0..0 1..1 2..2 3..3",
        "user: at the offset that it was told: 2",
        "user: views 6..6 5..5 2..2 235..3",
        "user: close: hipSuccess",
        "maker, when the other process has closed it: views 6..6 5..5 2..2 235..3",
        "maker: words that a kernel of the other process wrote wrong: 0",
        "the other process ended with 0",
    ] {
        assert!(ours.lines().any(|found| found == line), "{line}:\n{ours}\n{}", stack.report());
    }
    stack.daemon.wait_for_workers(0, SOON).unwrap();
}

/// The device's file stands for the render node. Each process has the one with its own memory.
#[test]
fn each_process_finds_its_own_memory_in_the_file_of_the_device() {
    const SIZE: u64 = 64 << 10;
    /// `KFD_IOC_ALLOC_MEM_FLAGS_*` of kfd_ioctl.h: VRAM, PUBLIC, WRITABLE.
    const FLAGS: u32 = 1 | 1 << 29 | 1 << 31;
    let stack = need!(Stack::start());
    let clients = [stack.client(), stack.client()];
    for (client, value) in clients.iter().zip([3u8, 4]) {
        let (_, list) = client.call::<GetApertures>(&Nothing {}, &[], 64).unwrap();
        let gpu_id = list[0].gpu_id;
        client.call::<AcquireVm>(&GpuRequest { gpu_id, pad: 0 }, &[], 0).unwrap();
        let request = AllocMemoryRequest { size: SIZE, gpu_id, flags: FLAGS, ..Default::default() };
        let handle = client.call::<AllocMemory>(&request, &[], 0).unwrap().0.handle;
        let blob = client.host_memory(handle, SIZE).unwrap();
        let mut other = Command::new(stack.artifacts.program("kfd-hostile").unwrap());
        other.args(["take", "0", &value.to_string()]).env(LOOPBACK_VARIABLE, stack.vm.socket());
        other.stdin(Stdio::from(blob.export().unwrap()));
        let output = other.output().unwrap();
        assert!(output.status.success(), "{output:?}\n{}", stack.report());
        let offset = blob.mmap_offset().unwrap();
        let device = File::from(client.device().unwrap().try_clone_to_owned().unwrap());
        let mut found = vec![0; SIZE as usize];
        device.read_exact_at(&mut found, offset).unwrap();
        assert!(found.iter().all(|byte| *byte == value), "what the other process wrote is not there");
    }
}

/// A request: call, ring, two numbers (`wire.rs` of the guest library), perhaps with a descriptor.
fn ask(socket: &OwnedFd, call: u32, first: u64, descriptor: Option<&OwnedFd>) {
    let mut bytes = [0; 24];
    bytes[..4].copy_from_slice(&call.to_le_bytes());
    bytes[8..16].copy_from_slice(&first.to_le_bytes());
    let list = descriptor.map(|descriptor| [descriptor.as_fd()]);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if let Some(list) = &list {
        assert!(control.push(SendAncillaryMessage::ScmRights(list)));
    }
    sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL).unwrap();
}

/// How a request ended: 0 for well.
fn answer(socket: &OwnedFd) -> u32 {
    let mut reply = [0; 4096];
    let count = rustix::io::read(socket, &mut reply).unwrap();
    assert!(count >= 32, "{count} bytes");
    u32::from_le_bytes(reply[..4].try_into().unwrap())
}

/// A process that leaves its replies unread, and keeps the connection when it has closed its first one, holds no thread.
#[test]
fn who_reads_no_reply_is_waited_for_by_nobody() {
    const GREET: u32 = 1;
    const CHANNEL: u32 = 2;
    const SUBMIT: u32 = 3;
    let stack = need!(Stack::start());
    let pair = |kind| socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
    let kind = SocketType::SEQPACKET;
    let before = stack.threads();
    let control = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
    connect(&control, &SocketAddrUnix::new(stack.vm.socket()).unwrap()).unwrap();
    ask(&control, GREET, 1, None);
    assert_eq!(answer(&control), 0);
    // Descriptors at which a thread would wait for ever are refused.
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let (datagrams, _others) = pair(SocketType::DGRAM);
    for wrong in [&reader, &writer, &datagrams] {
        ask(&control, CHANNEL, 0, Some(wrong));
        assert_ne!(answer(&control), 0);
    }
    let channels: Vec<OwnedFd> = (0..8)
        .map(|_| {
            let (own, other) = pair(kind);
            ask(&control, CHANNEL, 0, Some(&other));
            assert_eq!(answer(&control), 0);
            own
        })
        .collect();
    assert!(stack.threads() >= before + 8);
    for channel in &channels {
        rustix::net::sockopt::set_socket_timeout(
            channel,
            rustix::net::sockopt::Timeout::Send,
            Some(Duration::from_secs(1)),
        )
        .unwrap();
        let mut file = File::from(channel.try_clone().unwrap());
        let mut request = [0; 24];
        request[..4].copy_from_slice(&SUBMIT.to_le_bytes());
        // Until neither side has room, or the other one has closed its end.
        while file.write_all(&request).is_ok() {}
    }
    drop(control);
    let begin = Instant::now();
    while stack.threads() > before {
        let threads = stack.threads();
        assert!(begin.elapsed() < SOON, "{threads} threads, {before} before\n{}", stack.report());
        std::thread::sleep(Duration::from_millis(10));
    }
    // There are replies that could have been read all the while. That the other end was closed with requests in it is said before
    // them, once (ECONNRESET; unix_release_sock).
    let mut file = File::from(channels[0].try_clone().unwrap());
    let mut read = || file.read(&mut [0; 4096]);
    assert!(read().or_else(|_| read()).unwrap() > 0);
    assert!(stack.client().call::<GetClockCounters>(&GpuRequest::default(), &[], 0).is_ok());
    let mut rounds = Command::new(stack.artifacts.program("kfd-hostile").unwrap());
    rounds.args(["rounds", "1"]).env(LOOPBACK_VARIABLE, stack.vm.socket());
    assert!(run(rounds, LIMIT).unwrap().status.success(), "{}", stack.report());
}
