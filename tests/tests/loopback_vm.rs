//! A loop-back VM that several processes share: what a guest's processes can do with one another, without a guest.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use guest_thunk::client::Client;
use guest_thunk::transport::loopback::SharedContext;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use virtio_kfd_protocol::calls::*;
use virtio_kfd_protocol::{AllocMemoryRequest, GpuId, GpuRequest, Nothing};
use virtio_kfd_tests::c_program::{CProgram, Place};
use virtio_kfd_tests::conformance::FORKS;
use virtio_kfd_tests::native::{LOOPBACK_VARIABLE, SETS, Under, text};
use virtio_kfd_tests::parts::package_path;
use virtio_kfd_tests::{Artifacts, Daemon, Keeper, SharedVm, need};

/// What the end of a guest process takes at the most where the machine has nothing else to do.
const SECOND: Duration = Duration::from_secs(1);

/// The same where others want the CPUs as well.
const SOON: Duration = Duration::from_secs(30);
const LIMIT: Duration = Duration::from_secs(300);

/// A daemon and the one VM that it serves.
struct Stack {
    artifacts: Artifacts,
    vm: SharedVm,
    daemon: Daemon,
    directory: tempfile::TempDir,
}

impl Stack {
    fn start() -> anyhow::Result<Stack> {
        let artifacts = Artifacts::for_daemon(&["kfd-loopback-vm", "kfd-hostile"], &[])?;
        let daemon = Daemon::start(&artifacts, "model:gfx906", &[]).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let vm = SharedVm::start(&artifacts, daemon.socket(), directory.path(), LIMIT * 4).unwrap();
        Ok(Stack { artifacts, vm, daemon, directory })
    }

    fn hostile(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.artifacts.program("kfd-hostile").unwrap());
        command.args(arguments).env(LOOPBACK_VARIABLE, self.vm.socket());
        command
    }

    fn client(&self) -> Client {
        Client::over(Box::new(SharedContext::connect(self.vm.socket()).unwrap().unwrap())).unwrap()
    }

    fn run(&self, command: Command) -> String {
        text(command, LIMIT).unwrap_or_else(|error| {
            panic!("{error:#}\n{}\n{}", self.vm.report(), self.daemon.report());
        })
    }

    /// A process that has taken resources and waits, known by its output.
    fn hold(&self, name: &str) -> Keeper {
        let log = self.daemon.directory().join(name);
        let keeper = Keeper::start(self.hostile(&["hold"]), &log, LIMIT).unwrap();
        let begin = Instant::now();
        while !keeper.output().contains("ready") {
            let report = || format!("{}\n{}", keeper.report(), self.vm.report());
            assert!(keeper.is_running() && begin.elapsed() < SOON, "{}", report());
            std::thread::sleep(Duration::from_millis(2));
        }
        keeper
    }

    /// What the VM's process has open and how many threads it has.
    fn holdings(&self) -> (usize, usize) {
        let count =
            |name: &str| std::fs::read_dir(format!("/proc/{}/{name}", self.vm.pid())).unwrap().count();
        (count("fd"), count("task"))
    }

    /// The same once it does not change any more: what served processes that have ended goes by and by.
    fn settled(&self) -> (usize, usize) {
        let begin = Instant::now();
        let mut before = self.holdings();
        loop {
            std::thread::sleep(Duration::from_millis(100));
            let now = self.holdings();
            if now == before {
                return now;
            }
            assert!(begin.elapsed() < SOON, "{before:?}, {now:?}\n{}", self.vm.report());
            before = now;
        }
    }

    /// Waits until the VM's process has no more than that.
    fn wait_for_holdings(&self, (descriptors, threads): (usize, usize)) {
        let begin = Instant::now();
        loop {
            let found = self.holdings();
            if found.0 <= descriptors && found.1 <= threads {
                return;
            }
            let report = || format!("{found:?}, expected {descriptors}, {threads}\n{}", self.vm.report());
            assert!(begin.elapsed() < SOON, "{}", report());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// A neighbour that calls and checks the answers until it is told to end.
struct Neighbour(Child);

impl Neighbour {
    fn start(stack: &Stack) -> Neighbour {
        let mut command = stack.hostile(&["neighbour"]);
        Neighbour(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap())
    }

    /// Ends it, and tells what it said.
    fn end(mut self) -> String {
        drop(self.0.stdin.take());
        let output = self.0.wait_with_output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }
}

fn works(client: &Client) -> bool {
    client.call::<GetClockCounters>(&GpuRequest::default(), &[], 0).is_ok()
}

fn gpu(client: &Client) -> GpuId {
    let (_, list) = client.call::<GetApertures>(&Nothing {}, &[], 64).unwrap();
    let gpu_id = list[0].gpu_id;
    client.call::<AcquireVm>(&GpuRequest { gpu_id, pad: 0 }, &[], 0).unwrap();
    gpu_id
}

#[test]
fn eight_processes_work_at_once_and_leave_nothing() {
    let stack = need!(Stack::start());
    assert_eq!(stack.run(stack.hostile(&["rounds", "1"])), "rounds: 1\n");
    stack.daemon.wait_for_workers(0, SOON).unwrap();
    let before = (stack.daemon.settled(SOON).unwrap(), stack.settled());
    let neighbours: Vec<Neighbour> = (0..8).map(|_| Neighbour::start(&stack)).collect();
    stack.daemon.wait_for_workers(8, SOON).unwrap();
    for neighbour in neighbours {
        let said = neighbour.end();
        assert!(said.contains("all answers right"), "{said}");
    }
    stack.daemon.wait_for_workers(0, SOON).unwrap();
    stack.wait_for_holdings(before.1);
    let after = stack.daemon.settled(SOON).unwrap();
    assert_eq!((after.processes, after.descriptors), (before.0.processes, before.0.descriptors));
}

/// Cases C32 and C34; in a guest see qemu_gpu.rs.
#[test]
fn children_of_fork_open_and_work_beside_their_parent() {
    let stack = need!(Stack::start());
    let root = need!(stack.artifacts.packages(SETS[0]));
    let under = need!(Under::loopback(&stack.artifacts, stack.vm.socket()));
    let source = package_path("tests/c/forks.c");
    let program = CProgram::compile(&root, &source, Place::Host).unwrap();
    assert_eq!(stack.run(program.command(&under)), FORKS);
    stack.daemon.wait_for_workers(0, SOON).unwrap();
    assert!(!stack.vm.log().contains("was ended"), "{}", stack.vm.report());
}

/// Both kinds of memory, by a descriptor, in both directions; the descriptor keeps the memory when its maker is gone.
#[test]
fn a_dma_buf_is_the_same_memory_in_another_process() {
    const SIZE: u64 = 64 << 10;
    /// `KFD_IOC_ALLOC_MEM_FLAGS_*` of kfd_ioctl.h: VRAM, PUBLIC, WRITABLE.
    const FLAGS: u32 = 1 | 1 << 29 | 1 << 31;
    let stack = need!(Stack::start());
    let take = |dma_buf: &OwnedFd, byte: &str, next: &str| {
        let mut command = stack.hostile(&["take", byte, next]);
        command.stdin(Stdio::from(dma_buf.try_clone().unwrap()));
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        (output.status.success(), said, String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let taken = |result: (bool, String, String)| {
        let report = || format!("{result:?}\n{}\n{}", stack.vm.report(), stack.daemon.report());
        assert!(result.0 && result.1 == format!("took {SIZE} bytes\n"), "{}", report());
    };
    let client = stack.client();
    let gpu_id = gpu(&client);
    let request = AllocMemoryRequest { size: SIZE, gpu_id, flags: FLAGS, ..Default::default() };
    let vram = || client.call::<AllocMemory>(&request, &[], 0).unwrap().0.handle;
    let kinds = || [client.guest_memory(SIZE).unwrap(), client.host_memory(vram(), SIZE).unwrap()];
    let untaken = kinds().map(|blob| blob.export().unwrap());
    let mut descriptors = Vec::new();
    for blob in kinds() {
        let dma_buf = blob.export().unwrap();
        // New memory is zero.
        taken(take(&dma_buf, "0", "3"));
        taken(take(&dma_buf, "3", "4"));
        // Back to this process, which sees what the others left.
        let again = client.import(dma_buf.as_fd()).unwrap();
        assert_eq!((again.resource(), again.size()), (blob.resource(), SIZE));
        let wrong = take(&dma_buf, "3", "9");
        assert!(!wrong.0 && wrong.2.contains("is not 3"), "{wrong:?}");
        descriptors.push(dma_buf);
    }
    // Its maker goes, with all else that it had: who took the memory before keeps it, and passes it on.
    let heir = stack.client();
    let taken_over = descriptors.iter().map(|dma_buf| heir.import(dma_buf.as_fd()).unwrap());
    let taken_over: Vec<_> = taken_over.collect();
    drop(client);
    stack.daemon.wait_for_workers(1, SOON).unwrap();
    for (dma_buf, blob) in descriptors.iter().zip(&taken_over) {
        taken(take(dma_buf, "4", "5"));
        let passed_on = blob.export().unwrap();
        taken(take(&passed_on, "5", "6"));
    }
    // What nobody had taken then is gone (docs/limits.md): refused, and no other memory.
    for dma_buf in &untaken {
        let gone = take(dma_buf, "0", "0");
        assert!(!gone.0, "{gone:?}");
    }
    // What is no dma-buf of this VM.
    let file = tempfile::tempfile().unwrap();
    let foreign = take(&file.into(), "0", "0");
    assert!(!foreign.0 && foreign.2.contains("no dma-buf of this VM"), "{foreign:?}");
}

/// 20 times; each time all is given back, in the device's process and in the VM's, and the neighbour goes on.
#[test]
fn a_killed_process_leaves_the_others_right() {
    let stack = need!(Stack::start());
    let neighbour = Neighbour::start(&stack);
    stack.daemon.wait_for_workers(1, SOON).unwrap();
    let own: BTreeSet<u32> = stack.daemon.workers();
    let (mut first, mut shortest) = (None, SOON);
    for round in 0..20 {
        let keeper = stack.hold(&format!("hold-{round}"));
        // Killed in a wait on the host that has no end.
        std::thread::sleep(Duration::from_millis(round * 5));
        drop(keeper);
        let ended = stack.daemon.wait_for_workers(1, SOON);
        let took = ended.unwrap_or_else(|error| panic!("round {round}: {error:#}\n{}", stack.vm.report()));
        shortest = shortest.min(took);
        assert_eq!(stack.daemon.workers(), own);
        let begin = Instant::now();
        // The VM's process and the device's, workers not counted; the neighbour may have one more thread in a wait.
        loop {
            assert!(begin.elapsed() < SOON, "round {round}: before {first:?}");
            std::thread::sleep(Duration::from_millis(5));
            // The worker that has ended may still be there, and not let itself be looked into.
            let Ok(device) = stack.daemon.holdings() else { continue };
            let now = (stack.holdings().0, device.descriptors);
            let kept = *first.get_or_insert(now);
            if round < 3 {
                first = Some(now);
                break;
            }
            if now.0 <= kept.0 && now.1 <= kept.1 {
                break;
            }
        }
    }
    println!("the worker of a killed process was gone after {shortest:?} at best");
    assert!(shortest < SECOND, "{shortest:?}");
    let said = neighbour.end();
    assert!(said.contains("all answers right"), "{said}");
    stack.daemon.wait_for_workers(0, SOON).unwrap();
}

/// A process that says what is none of the language, or goes in the middle of a greeting, loses its connection, and nobody
/// else notices.
#[test]
fn garbage_harms_its_sender_only() {
    let stack = need!(Stack::start());
    let client = stack.client();
    let before = stack.settled();
    let neighbour = Neighbour::start(&stack);
    let address = SocketAddrUnix::new(stack.vm.socket()).unwrap();
    let raw = || {
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let socket = socket.unwrap();
        connect(&socket, &address).unwrap();
        socket
    };
    // A greeting: call 1, ring 0, version 1, nothing.
    let mut greeting = [0u8; 24];
    greeting[0] = 1;
    greeting[8] = 1;
    let mut state = 12345u64;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize
    };
    for round in 0..200 {
        let socket = raw();
        if round % 4 != 0 {
            rustix::io::write(&socket, &greeting).unwrap();
            let mut reply = [0; 256];
            assert!(rustix::io::read(&socket, &mut reply).unwrap() > 0);
            assert_eq!(reply[0], 0, "greeted");
        }
        for _ in 0..round % 7 {
            let mut bytes: Vec<u8> = (0..random() % 300).map(|_| random() as u8).collect();
            // Half of them have the size of a request, and a call that exists.
            if random() % 2 == 0 {
                bytes.resize(24, 0);
                bytes[..4].copy_from_slice(&((random() % 16) as u32).to_le_bytes());
            }
            // It may have been ended by what was sent before.
            if rustix::io::write(&socket, &bytes).is_err() {
                break;
            }
        }
    }
    assert!(works(&client), "{}", stack.vm.report());
    let said = neighbour.end();
    assert!(said.contains("all answers right"), "{said}");
    assert!(stack.vm.is_running() && !stack.vm.log().contains("panicked"), "{}", stack.vm.report());
    // Frames of garbage, with a neighbour of its own.
    let seen = stack.run(stack.hostile(&["attack", "5", "300"]));
    assert!(seen.contains("none accepted") && seen.contains("all answers right"), "{seen}");
    assert!(works(&client));
    drop(client);
    stack.daemon.wait_for_workers(0, SOON).unwrap();
    stack.wait_for_holdings(before);
}

/// Without its VM a process has lost its GPUs, and says so; without its daemon the VM ends.
#[test]
fn the_end_of_the_vm_is_the_end_of_its_connections() {
    let stack = need!(Stack::start());
    let client = stack.client();
    let Stack { vm, daemon, artifacts, directory } = stack;
    drop(vm);
    assert!(!works(&client) && client.is_lost());
    daemon.wait_for_workers(0, SOON).unwrap();
    // A path that a killed VM left behind is taken over.
    let vm = SharedVm::start(&artifacts, daemon.socket(), directory.path(), LIMIT).unwrap();
    let client = loop {
        // The path is the old one until the new VM listens.
        match SharedContext::connect(vm.socket()) {
            Ok(Some(context)) => break Client::over(Box::new(context)).unwrap(),
            _ => assert!(vm.is_running(), "{}", vm.report()),
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    assert!(works(&client));
    // A second VM at the same path is refused, and the first one goes on.
    let mut second = Command::new(artifacts.program("kfd-loopback-vm").unwrap());
    second.arg("--device").arg(daemon.socket()).arg("--socket").arg(vm.socket());
    let output = second.stdin(Stdio::null()).output().unwrap();
    assert!(!output.status.success(), "{output:?}");
    let said = |socket: &Path| {
        let mut wrong = Command::new(artifacts.program("kfd-loopback-vm").unwrap());
        wrong.arg("--device").arg(daemon.socket()).arg("--socket").arg(socket);
        let output = wrong.stdin(Stdio::null()).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let text = said(vm.socket());
    assert!(text.ends_with(": another program is listening on it\n"), "{text}");
    let text = said(daemon.socket());
    assert!(text.contains("--device and --socket are both "), "{text}");
    let text = said(Path::new("/nonexistent/dir/s"));
    assert!(text.contains("the directory /nonexistent/dir does not exist"), "{text}");
    let text = said(&directory.path().join("x".repeat(200)));
    assert!(text.contains(" bytes, and a socket's has at most 107"), "{text}");
    assert!(works(&client));
    drop(daemon);
    assert!(!works(&client));
    let begin = Instant::now();
    while vm.is_running() {
        assert!(begin.elapsed() < SOON, "{}", vm.report());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(vm.log().contains("the device has closed"), "{}", vm.report());
}
