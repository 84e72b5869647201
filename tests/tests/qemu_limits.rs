//! What a program in a guest cannot do with memory of `hsaKmtAllocMemory`, as docs/limits.md states it: each limit is seen
//! here, so that a kernel that lifts one, or a change that adds one, is noticed.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

use std::path::{Path, PathBuf};
use std::time::Duration;

use virtio_kfd_tests::c_program::Place;
use virtio_kfd_tests::native::text;
use virtio_kfd_tests::{Artifacts, CProgram, Command, Daemon, Guest, Under, Vm, need};

const SET: &str = "rocm-trixie";
const PROFILE: &str = "gfx906";
const LIMIT: Duration = Duration::from_secs(60);
const PROGRAM: &str = "/opt/virtio-kfd/syscalls";

/// Questions whose answers differ: on ordinary memory, which is what bare metal has, and on the guest library's, with the
/// Linux 6.12 of the image. The reason for nearly all is one: the memory is mapped without `struct page`s (VM_PFNMAP, set
/// by drm_gem_shmem_mmap), so whatever takes hold of a page cannot.
const DIFFER: &[(&str, &str, &str)] = &[
    ("write() with O_DIRECT", "ok", "EFAULT"),
    ("read() with O_DIRECT", "ok", "EFAULT"),
    ("io_uring, O_DIRECT", "ok", "EFAULT"),
    ("io_uring, registered buffer", "ok", "EFAULT"),
    ("process_vm_readv() from it", "ok", "EFAULT"),
    ("process_vm_writev() to it", "ok", "EFAULT"),
    ("vmsplice()", "ok", "EFAULT"),
    ("send() with MSG_ZEROCOPY", "ok", "EFAULT"),
    ("futex, shared", "ok", "EFAULT"),
    ("userfaultfd", "ok", "EINVAL"),
    ("move_pages(), query", "ok", "ENOENT"),
    ("MADV_DONTNEED", "ok, zeros", "EINVAL"),
    ("MADV_FREE", "ok, the data stays", "EINVAL"),
    ("MADV_REMOVE", "EINVAL", "ENODEV"),
    ("MADV_POPULATE_WRITE", "ok", "EINVAL"),
    ("MADV_DODUMP", "ok", "EINVAL"),
    ("mincore()", "ok", "not resident"),
    ("/proc/self/mem", "ok", "EIO"),
    ("process_vm_readv() by another process", "ok", "EFAULT"),
    ("a debugger", "ok", "EIO"),
    ("counted in RSS", "ok", "not counted"),
    ("fork()", "the child has a copy", "the child has not got it"),
    ("mremap(), grown", "ok", "EFAULT"),
    ("core dump", "ok", "not in it"),
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

/// A question and its answer.
type Line = (String, String);

fn package() -> PathBuf {
    std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from)
}

fn source() -> PathBuf {
    package().join("tests/c/syscalls.c")
}

/// What a shell script prints, run by an ordinary user, question by question.
fn ask(guest: &Guest, daemon: &Daemon, script: &str) -> Vec<Line> {
    let command = Command::new("su").args(&["-s", "/bin/sh", "user", "-c", script]).limit(LIMIT);
    let output = guest.run(&command).unwrap();
    assert!(output.success(), "{script}: {output}\n{}", daemon.report());
    let split = |line: &str| {
        let (question, answer) = line.rsplit_once(": ").unwrap_or_else(|| panic!("{line:?}"));
        (question.to_owned(), answer.to_owned())
    };
    output.text().lines().map(split).collect()
}

/// All questions to memory of one kind.
fn answers(guest: &Guest, daemon: &Daemon, kind: &str) -> Vec<Line> {
    let mut lines = ask(guest, daemon, &format!("{PROGRAM} {kind} /dev/ram0"));
    let crash = format!("rm -f core; {PROGRAM} {kind} crash 2>/dev/null >&2; {PROGRAM} {kind} core");
    lines.extend(ask(guest, daemon, &format!("cd /tmp/core && {{ {crash}; }}")));
    lines
}

#[test]
fn system_calls_on_memory_of_the_thunk() {
    let artifacts = need!(Artifacts::find());
    let mut builder = need!(Vm::builder(&artifacts));
    need!(artifacts.qemu());
    need!(artifacts.image());
    need!(artifacts.thunk());
    let root = need!(artifacts.packages(SET));
    need!(artifacts.program("vhost-user-kfd"));
    let program = CProgram::compile(&root, &package().join("tests/c/syscalls.c"), Place::Guest).unwrap();
    builder.overlay().file(PROGRAM.trim_start_matches('/'), program.path()).unwrap();
    let daemon = Daemon::start(&artifacts, &format!("model:{PROFILE}"), &[]).unwrap();
    let guest = builder
        .module("brd")
        .vhost_user_gpu(daemon.socket())
        .boot()
        .unwrap_or_else(|error| panic!("{error:#}\n{}", daemon.report()));
    let prepare = "chmod 666 /dev/dri/renderD* /dev/ram0; chmod 755 /opt/virtio-kfd; ifconfig lo up; \
                   mkdir -m 777 /tmp/core; echo core > /proc/sys/kernel/core_pattern; \
                   echo 0 > /proc/sys/kernel/core_uses_pid";
    guest.run(&Command::shell(prepare)).unwrap().checked().unwrap();

    let ordinary = answers(&guest, &daemon, "ordinary");
    let thunk = answers(&guest, &daemon, "thunk");
    for work in WORK {
        assert!(thunk.contains(&((*work).to_owned(), "ok".to_owned())), "{work}: {thunk:#?}");
    }
    let questions = |lines: &[Line]| lines.iter().map(|(question, _)| question.clone()).collect::<Vec<_>>();
    assert_eq!(questions(&ordinary), questions(&thunk));
    let differ: Vec<(&str, &str, &str)> = ordinary
        .iter()
        .zip(&thunk)
        .filter(|((_, native), (_, ours))| native != ours)
        .map(|((question, native), (_, ours))| (question.as_str(), native.as_str(), ours.as_str()))
        .collect();
    assert_eq!(differ, DIFFER, "docs/limits.md says what differs");
}

/// That bare metal answers as ordinary memory does: AMD's own library, on the model. (Its questions about a block device
/// stay open, for a test has none on the host.)
#[test]
fn natively_it_is_ordinary_memory() {
    let artifacts = need!(Artifacts::find());
    let root = need!(artifacts.packages(SET));
    let under = need!(Under::model(&artifacts, PROFILE));
    let program = CProgram::compile(&root, &source(), Place::Host).unwrap();
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
    let page = std::fs::read_to_string(package().join(Path::new("../docs/limits.md"))).unwrap();
    for (question, native, ours) in DIFFER {
        let row = format!("| {question} | {native} | {ours} |");
        assert!(page.contains(&row), "docs/limits.md lacks the row: {row}");
    }
}
