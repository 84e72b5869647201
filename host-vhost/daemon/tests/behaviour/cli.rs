//! The command line, and bad input on the host's side.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use vhost::vhost_user::Frontend;
use vhost::{VhostBackend, VringConfigData};

use crate::daemon::{Daemon, program, program_with_log, wait_for, wait_for_some};
use crate::gpu::*;
use crate::stub;
use crate::vmm::{Setup, Vmm, inheritable};

crate::tests![
    bad_input_ends_with_one_sentence,
    the_start_says_what_the_vm_gets_and_where,
    guest_memory_that_is_not_shared_is_named,
    capabilities,
    once,
    a_signal_ends_everything,
    a_connected_descriptor,
    a_descriptor_and_the_memory_device,
    a_listening_descriptor,
    descriptors_that_were_left_open_end_here,
];

fn bad_input_ends_with_one_sentence() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    let socket = socket.to_str().unwrap();
    let file = directory.path().join("file");
    std::fs::write(&file, "").unwrap();
    let file = file.to_str().unwrap();
    let cases: &[(&[&str], &str)] = &[
        (&[], "--socket PATH or --fd N"),
        (&["--socket", "/nonexistent/dir/s"], "directory /nonexistent/dir does not exist"),
        (&["--socket", file], "not a socket"),
        (&["--fd", "97"], "--fd 97"),
        (&["--socket", socket, "--gpu", stub::NO_KFD], "/dev/kfd: no such file"),
        (&["--socket", socket, "--gpu", stub::NO_GPU], "no GPU of this host matches"),
        (&["--socket", socket, "--gpu", stub::MUTE], "exited with status 7"),
        (
            &["--socket", socket, "--kfd", "model:gfx906", "--model-library", "/nonexistent.so"],
            "/nonexistent.so",
        ),
    ];
    for (arguments, sentence) in cases {
        let output = program().args(*arguments).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {text}");
        assert!(text.contains(sentence), "{arguments:?}: {text}");
        assert_eq!(text.lines().count(), 1, "{arguments:?}: {text}");
        assert!(!std::path::Path::new(socket).exists());
    }
    let memory = |socket: &str, path: &str, size: &str| {
        let arguments = ["--socket", socket, "--memory-socket", path, "--memory-size", size];
        let output = program().args(arguments).output().unwrap();
        assert!(!output.status.success());
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(!std::path::Path::new(socket).exists(), "{text}");
        text
    };
    let other = directory.path().join("m");
    let other = other.to_str().unwrap();
    assert!(
        memory(socket, "/nonexistent/dir/m", "4M").contains("--memory-socket /nonexistent/dir/m: the dir")
    );
    assert!(memory(socket, file, "4M").contains(&format!("--memory-socket {file}: there is a file")));
    let same = format!("{}/./s", directory.path().display());
    assert!(memory(socket, &same, "4M").contains("each device has a socket of its own"));
    assert!(memory(socket, other, "900T").contains("MiB of memory and swap"));
    assert!(memory(socket, other, "0").contains("expected at least 2M, and found `0`"));
    assert!(memory(socket, other, "1M").contains("expected at least 2M, and found `1M`"));
    let output = program().args(["--socket", socket, "--worker", "/nonexistent/worker"]).output().unwrap();
    assert!(!output.status.success(), "given twice");
    let mut alone = Command::new(env!("CARGO_BIN_EXE_vhost-user-kfd"));
    let output = alone.args(["--socket", socket, "--worker", "/nonexistent/worker"]).output().unwrap();
    assert!(String::from_utf8(output.stderr).unwrap().contains("/nonexistent/worker does not exist"));
}

/// The daemon's log up to its first connection.
fn the_start_says_what_the_vm_gets_and_where() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    let mut program = program_with_log("info");
    let mut child = program.arg("--socket").arg(&socket).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    let place = format!("listening on {}", socket.display());
    let said: Vec<String> = lines.by_ref().take_while(|line| !line.contains(&place)).collect();
    assert!(said.iter().any(|line| line.contains("the VM gets 1 GPU of this host")), "{said:?}");
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
    assert!(child.wait().unwrap().success());
}

/// What QEMU does without `share=on`: the memory has no descriptor, so the table stays empty, and queues lie nowhere.
fn guest_memory_that_is_not_shared_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    let mut program = program();
    let child = program.arg("--socket").arg(&socket).arg("--once").stderr(Stdio::piped()).spawn().unwrap();
    wait_for("the socket", || socket.exists());
    let vmm = Frontend::connect(&socket, 2).unwrap();
    vmm.set_owner().unwrap();
    let offered = vmm.get_features().unwrap();
    vmm.set_features(offered).unwrap();
    vmm.set_vring_num(0, 64).unwrap();
    let queue = VringConfigData {
        queue_max_size: 64,
        queue_size: 64,
        flags: 0,
        desc_table_addr: 0x1000,
        used_ring_addr: 0x2000,
        avail_ring_addr: 0x3000,
        log_addr: None,
    };
    // It is not answered, or the connection is over.
    let _ = vmm.set_vring_addr(0, &queue);
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("none of the guest's memory has come") && text.contains("share=on"), "{text}");
}

fn capabilities() {
    let output = program().arg("--print-capabilities").output().unwrap();
    assert!(output.status.success());
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "{\"features\":[],\"type\":\"gpu\"}\n");
}

fn once() {
    let mut daemon = Daemon::start(&["--once"]);
    let mut vmm = Vmm::connect(&daemon);
    open_context(&mut vmm, 1);
    drop(vmm);
    let status = wait_for_some("the end", || daemon.child.try_wait().unwrap());
    assert!(status.success());
    assert!(!daemon.socket.exists());
}

fn a_signal_ends_everything() {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let mut daemon = Daemon::start(&[]);
        let mut vmm = Vmm::connect(&daemon);
        open_context(&mut vmm, 1);
        vmm.submit(&submit(1, stub::HELD_RING, 1, &nop(1, 0)));
        let worker = daemon.workers()[0];
        kill(Pid::from_raw(daemon.child.id() as i32), signal).unwrap();
        let status = wait_for_some("the end", || daemon.child.try_wait().unwrap());
        assert!(status.success());
        assert!(!daemon.socket.exists());
        wait_for("the end of the worker", || !std::path::Path::new(&format!("/proc/{worker}")).exists());
    }
}

fn start_with(descriptor: &OwnedFd) -> std::process::Child {
    let number = descriptor.as_fd().as_raw_fd().to_string();
    program().args(["--fd", &number]).stderr(Stdio::inherit()).spawn().unwrap()
}

fn a_connected_descriptor() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let theirs = inheritable(theirs);
    let mut child = start_with(&theirs);
    drop(theirs);
    let mut vmm = Vmm::set_up(ours, Setup::default());
    open_context(&mut vmm, 1);
    check_context(&mut vmm, 1);
    assert_eq!(kind(&vmm.command(&host_blob(1, 60, stub::GOOD_BUFFER, 0x1000))), OK);
    assert_eq!(kind(&vmm.command(&map_blob(60, 0))), OK_MAP_INFO);
    drop(vmm);
    assert!(wait_for_some("the end", || child.try_wait().unwrap()).success());
}

/// The memory device beside a socket that somebody else opened.
fn a_descriptor_and_the_memory_device() {
    let directory = tempfile::tempdir().unwrap();
    let memory = directory.path().join("m");
    let listener = OwnedFd::from(UnixListener::bind(directory.path().join("s")).unwrap());
    rustix::io::fcntl_setfd(&listener, rustix::io::FdFlags::empty()).unwrap();
    let number = listener.as_raw_fd().to_string();
    let mut program = program();
    program.args(["--fd", &number, "--memory-size", "4M", "--memory-socket"]).arg(&memory);
    let mut child = program.spawn().unwrap();
    drop(listener);
    let vmm = wait_for_some("the memory device", || UnixStream::connect(&memory).ok());
    let mut kfd = Vmm::set_up(UnixStream::connect(directory.path().join("s")).unwrap(), Setup::default());
    open_context(&mut kfd, 1);
    // The device has it: what is said there is answered. VHOST_USER_GET_FEATURES, version 1, no payload.
    let mut vmm = vmm;
    vmm.write_all(&[1u32, 1, 0].map(u32::to_le_bytes).concat()).unwrap();
    let mut answer = [0; 20];
    vmm.read_exact(&mut answer).unwrap();
    assert_eq!(answer[..12], [1u32, 5, 8].map(u32::to_le_bytes).concat());
    child.kill().unwrap();
    child.wait().unwrap();
}

fn a_listening_descriptor() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let listener = OwnedFd::from(UnixListener::bind(&path).unwrap());
    rustix::io::fcntl_setfd(&listener, rustix::io::FdFlags::empty()).unwrap();
    let mut child = start_with(&listener);
    for _ in 0..2 {
        let mut vmm = Vmm::set_up(UnixStream::connect(&path).unwrap(), Setup::default());
        open_context(&mut vmm, 1);
        check_context(&mut vmm, 1);
        drop(vmm);
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

/// A shell or a service manager may have open what neither the device nor a worker is to reach.
fn descriptors_that_were_left_open_end_here() {
    let secret = rustix::fs::memfd_create("left-open", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    // With a number that no child uses for something else.
    let left_open = nix::fcntl::fcntl(&secret, nix::fcntl::FcntlArg::F_DUPFD(40)).unwrap();
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    open_context(&mut vmm, 1);
    let has = |pid: u32| {
        let open = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
        let names = open.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
        names.filter(|name| name.to_string_lossy().contains("left-open")).count()
    };
    assert_eq!(has(daemon.child.id()), 1, "the test leaves it open");
    assert_eq!(has(daemon.device()), 0);
    assert_eq!(has(daemon.workers()[0]), 0);
    nix::unistd::close(left_open).unwrap();
}
