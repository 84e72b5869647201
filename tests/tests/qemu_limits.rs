//! What a program in a guest cannot do with memory of `hsaKmtAllocMemory`, as docs/limits.md states it: each limit is seen
//! here, so that a kernel that lifts one, or a change that adds one, is noticed.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

use std::path::PathBuf;
use std::time::Duration;

use virtio_kfd_tests::c_program::Place;
use virtio_kfd_tests::gpu_view::GpuView;
use virtio_kfd_tests::guest::Running;
use virtio_kfd_tests::native::text;
use virtio_kfd_tests::parts::package_path;
use virtio_kfd_tests::talk::Talk;
use virtio_kfd_tests::{Artifacts, CProgram, Command, Daemon, Guest, Under, Vm, need};

const SET: &str = "rocm-trixie";
const PROFILE: &str = "gfx906";
const LIMIT: Duration = Duration::from_secs(60);
const SYSCALLS: &str = "/opt/virtio-kfd/syscalls";
const POOL_PROGRAM: &str = "/opt/virtio-kfd/pool";

/// A question with its answers: on ordinary memory, which is what bare metal has; on the guest library's GUEST blobs; on
/// its memory of the pool.
type Row = (&'static str, &'static str, &'static str, &'static str);

/// The questions whose answers differ, with the Linux 6.12 of the image. The reason for nearly all of the second ones is
/// that a blob is mapped without `struct page`s (VM_PFNMAP, set by drm_gem_shmem_mmap), so whatever takes hold of a page
/// cannot.
const DIFFER: &[Row] = &[
    ("write() with O_DIRECT", "ok", "EFAULT", "ok"),
    ("read() with O_DIRECT", "ok", "EFAULT", "ok"),
    ("io_uring, O_DIRECT", "ok", "EFAULT", "ok"),
    ("io_uring, registered buffer", "ok", "EFAULT", "EOPNOTSUPP"),
    ("process_vm_readv() from it", "ok", "EFAULT", "ok"),
    ("process_vm_writev() to it", "ok", "EFAULT", "ok"),
    ("vmsplice()", "ok", "EFAULT", "ok"),
    ("send() with MSG_ZEROCOPY", "ok", "EFAULT", "ok"),
    ("futex, shared", "ok", "EFAULT", "ok"),
    ("userfaultfd", "ok", "EINVAL", "EINVAL"),
    ("move_pages(), query", "ok", "ENOENT", "ENOENT"),
    ("MADV_DONTNEED", "ok, zeros", "EINVAL", "ok, the data stays"),
    ("MADV_FREE", "ok, the data stays", "EINVAL", "EINVAL"),
    ("MADV_REMOVE", "EINVAL", "ENODEV", "EOPNOTSUPP"),
    ("MADV_POPULATE_WRITE", "ok", "EINVAL", "ok"),
    ("MADV_DODUMP", "ok", "EINVAL", "EINVAL"),
    ("mincore()", "ok", "not resident", "ok"),
    ("/proc/self/mem", "ok", "EIO", "ok"),
    ("process_vm_readv() by another process", "ok", "EFAULT", "ok"),
    ("a debugger", "ok", "EIO", "ok"),
    ("counted in RSS", "ok", "not counted", "not counted"),
    ("fork()", "the child has a copy", "the child has not got it", "the child has not got it"),
    ("mremap(), grown", "ok", "EFAULT", "ok"),
    ("core dump", "ok", "not in it", "not in it"),
];

/// What must work, so that the list above cannot pass on a program that asks nothing.
const WORK: &[&str] = &[
    "read(), buffered",
    "write(), buffered",
    "recvmsg()",
    "io_uring, buffered",
    "futex, private",
    "mprotect()",
];

/// The memory device in QEMU: virtio-fs, with a window.
const MEMORY_DEVICE: &str =
    "vhost-user-test-device-pci,chardev=memory,virtio-id=26,num_vqs=2,vq_size=128,config_size=40";

/// What the pool grants, in MiB.
const POOL: u64 = 128;

/// What the guest's administrator does.
const MOUNT: &str = "mkdir -p /run/virtio-kfd && mount -t virtiofs -o dax=always virtio-kfd /run/virtio-kfd";

/// A question and its answer.
type Line = (String, String);

struct Stack {
    daemon: Daemon,
    guest: Guest,
}

fn source(name: &str) -> PathBuf {
    package_path(&format!("tests/c/{name}.c"))
}

/// A command for the user without privileges.
fn user(script: &str) -> Command {
    virtio_kfd_tests::parts::user(script).limit(LIMIT)
}

impl Stack {
    /// What a shell script prints, run by an ordinary user.
    #[track_caller]
    fn run(&self, script: &str) -> String {
        let output = self.guest.run(&user(script)).unwrap();
        assert!(output.success(), "{script}: {output}\n{}", self.daemon.report());
        output.text()
    }

    #[track_caller]
    fn root(&self, script: &str) -> String {
        self.guest.run(&Command::shell(script).limit(LIMIT)).unwrap().checked().unwrap().text()
    }

    /// All questions to memory of one kind.
    fn answers(&self, kind: &str) -> Vec<Line> {
        let crash = format!("rm -f core; {SYSCALLS} {kind} crash 2>/dev/null >&2; {SYSCALLS} {kind} core");
        let ask = format!("{SYSCALLS} {kind} /dev/ram0 && cd /tmp/core && {{ {crash}; }}");
        let split = |line: &str| {
            let (question, answer) = line.rsplit_once(": ").unwrap_or_else(|| panic!("{line:?}"));
            (question.to_owned(), answer.to_owned())
        };
        self.run(&ask).lines().map(split).collect()
    }

    /// Free granules of the pool.
    fn free(&self) -> u64 {
        self.root("stat -f -c %f /run/virtio-kfd").trim().parse().unwrap()
    }

    /// Starts a process that holds so much memory, and the answer to whether it is of the pool.
    fn hold(&self, mebibytes: u64) -> (Running, String) {
        let script = format!("exec {POOL_PROGRAM} hold {}", mebibytes << 20);
        let mut running = self.guest.spawn(&user(&script).talks()).unwrap();
        let line = running.next_line(LIMIT).unwrap();
        let line = line.unwrap_or_else(|| panic!("no line\n{}", self.daemon.report()));
        (running, line)
    }

    /// What the GPU and the CPU see of allocations of these sizes.
    fn share(&self, sizes: &[u64]) -> Vec<String> {
        let sizes: Vec<String> = sizes.iter().map(u64::to_string).collect();
        let command = user(&format!("exec {POOL_PROGRAM} share {}", sizes.join(" "))).talks();
        let mut process: Box<dyn Talk> = Box::new(self.guest.spawn(&command).unwrap());
        let mut view = GpuView::new(&self.daemon.gpus());
        let mut lines = Vec::new();
        while let Some(line) = process.next_line(LIMIT).unwrap() {
            match line.starts_with('@') {
                true => process.say(&view.answer(&line).unwrap()).unwrap(),
                false => lines.push(line),
            }
        }
        process.finish().unwrap_or_else(|error| panic!("{error:#}\n{}", self.daemon.report()));
        lines
    }
}

/// What `pool share` prints for allocations of the pool.
fn right(sizes: &[u64]) -> Vec<String> {
    let one = |size: &u64| {
        [
            format!("{size} bytes: pooled, zero"),
            "the GPU reads: same".to_owned(),
            "the GPU writes: done".to_owned(),
            "the CPU reads: same".to_owned(),
        ]
    };
    sizes.iter().flat_map(one).collect()
}

#[test]
fn system_calls_on_memory_of_the_thunk() {
    let artifacts = need!(Artifacts::for_guest(&[], &[SET]));
    let mut builder = Vm::builder(&artifacts).unwrap();
    need!(artifacts.thunk());
    let root = artifacts.packages(SET).unwrap();
    let programs = [("syscalls", SYSCALLS), ("pool", POOL_PROGRAM)]
        .map(|(name, place)| (CProgram::compile(&root, &source(name), Place::Guest).unwrap(), place));
    for (program, place) in &programs {
        builder.overlay().file(place.trim_start_matches('/'), program.path()).unwrap();
    }
    let directory = tempfile::tempdir().unwrap();
    let memory = directory.path().join("memory");
    let size = format!("{POOL}M");
    let arguments = ["--memory-socket", memory.to_str().unwrap(), "--memory-size", &size];
    let daemon = Daemon::start_watched(&artifacts, &format!("model:{PROFILE}"), &arguments).unwrap();
    let guest = builder
        .module("brd")
        .argument("-chardev")
        .argument(&format!("socket,id=memory,path={}", memory.display()))
        .argument("-device")
        .argument(MEMORY_DEVICE)
        .boot_on(&daemon)
        .unwrap();
    let stack = Stack { daemon, guest };
    stack.root(
        "chmod 666 /dev/dri/renderD* /dev/ram0; chmod 755 /opt/virtio-kfd; ifconfig lo up; \
         mkdir -m 777 /tmp/core; echo core > /proc/sys/kernel/core_pattern; \
         echo 0 > /proc/sys/kernel/core_uses_pid",
    );

    let ordinary = stack.answers("ordinary");
    let blob = stack.answers("thunk");
    stack.root(MOUNT);
    let pooled = stack.answers("thunk");
    for work in WORK {
        assert!(blob.contains(&((*work).to_owned(), "ok".to_owned())), "{work}: {blob:#?}");
    }
    let questions = |lines: &[Line]| lines.iter().map(|(question, _)| question.clone()).collect::<Vec<_>>();
    assert_eq!(questions(&ordinary), questions(&blob));
    assert_eq!(questions(&ordinary), questions(&pooled));
    let answers = ordinary.iter().zip(&blob).zip(&pooled);
    let differ: Vec<(&str, &str, &str, &str)> = answers
        .map(|(((question, native), (_, blob)), (_, pooled))| (&**question, &**native, &**blob, &**pooled))
        .filter(|(_, native, blob, pooled)| native != blob || native != pooled)
        .collect();
    assert_eq!(differ, DIFFER, "docs/limits.md says what differs");

    memory_of_the_pool(&stack);
}

/// The pool as guest processes have it: shared with the GPU, bounded, zeroed, and gone with its process.
fn memory_of_the_pool(stack: &Stack) {
    // One page; more than a granule; many granules, not all of the last one.
    let sizes = [4096, (2 << 20) + 4096, (17 << 20) + 8192];
    assert_eq!(stack.share(&sizes), right(&sizes));
    let all = POOL / 2;
    assert_eq!(stack.free(), all, "all is given back");

    // A granule is two MiB; the library's own memory for answers is no part of the pool.
    let (held, line) = stack.hold(41);
    assert_eq!(line, "held, pooled");
    assert_eq!(stack.free(), all - 21);
    let name = stack.root(
        "grep -o '/run/virtio-kfd/[0-9a-f]*' /proc/$(pidof pool)/maps | sort -u; \
         f=$(grep -o '/run/virtio-kfd/[0-9a-f]*' /proc/$(pidof pool)/maps | head -1); \
         cat $f 2>&1; su -s /bin/sh user -c \"ls /run/virtio-kfd; : > $f\" 2>&1; true",
    );
    assert!(name.contains("No such file"), "a file cannot be opened again: {name}");
    assert!(name.contains("ls: can't open '/run/virtio-kfd': Permission denied"), "{name}");
    assert!(name.contains("File exists"), "nor made again: {name}");

    // More than is left: what a guest without the device has.
    let (second, line) = stack.hold(100);
    assert_eq!(line, "held, not pooled");
    let (third, line) = stack.hold(86);
    assert_eq!(line, "held, pooled");
    assert_eq!(stack.free(), 0);

    // Killed in the middle of its use.
    stack.root("kill -9 $(pidof pool); while pidof pool; do sleep 0.1; done");
    stack.daemon.wait_for_workers(0, LIMIT).unwrap();
    for process in [held, second, third] {
        process.wait().unwrap();
    }
    assert_eq!(stack.free(), all, "killed processes leave nothing: {}", stack.daemon.report());
    // Three times nearly all, since the kernel takes the places of the larger window in turn.
    let most = (POOL - 4) << 20;
    let zero = stack.run(&format!("{POOL_PROGRAM} zero {most} {most} {most}"));
    assert_eq!(zero, "pooled, zero\n".repeat(3), "what they wrote is gone");

    // Mounted anew.
    stack.root(&format!("umount /run/virtio-kfd && {MOUNT}"));
    assert_eq!(stack.share(&sizes), right(&sizes));
    let kernel = stack.root("dmesg | grep -E 'BUG|Oops|WARNING|hung|response 0x12' || true");
    assert_eq!(kernel, "", "the guest's kernel");
}

/// That bare metal answers as ordinary memory does: AMD's own library, on the model. (Its questions about a block device
/// stay open, for a test has none on the host.)
#[test]
fn natively_it_is_ordinary_memory() {
    let artifacts = need!(Artifacts::find());
    let root = need!(artifacts.packages(SET));
    let under = need!(Under::model(&artifacts, PROFILE));
    let program = CProgram::compile(&root, &source("syscalls"), Place::Host).unwrap();
    let answers = |kind: &str| {
        let mut command = program.command(&under);
        command.args([kind, "/none"]);
        text(command, LIMIT).unwrap()
    };
    let thunk = answers("thunk");
    assert!(thunk.contains("process_vm_readv() from it: ok"), "{thunk}");
    assert_eq!(thunk, answers("ordinary"));
}

/// The page and the list above are one.
#[test]
fn the_page_of_limits_names_each() {
    let page = std::fs::read_to_string(package_path("../docs/limits.md")).unwrap();
    for (question, native, blob, pooled) in DIFFER {
        let row = format!("| {question} | {native} | {blob} | {pooled} |");
        assert!(page.contains(&row), "docs/limits.md lacks the row: {row}");
    }
}
