//! Unusual programs and machines under `libkfd_preload.so`: a runtime that is loaded by hand and unloaded, AMD's own thunk asked for what
//! is refused, sockets that are no daemon's. Expected: what the same programs print natively on the model.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

use std::io::Write;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use virtio_kfd_tests::c_program::Place;
use virtio_kfd_tests::native::{INSIDE, run, runtime, text};
use virtio_kfd_tests::parts::package_path;
use virtio_kfd_tests::{Artifacts, CProgram, Daemon, Under, need};

const LIMIT: Duration = Duration::from_secs(240);

macro_rules! parts {
    ($artifacts:ident) => {
        let $artifacts = need!(Artifacts::for_daemon(&["libkfd_preload.so"], &[]));
    };
}

fn source(name: &str) -> PathBuf {
    package_path("tests/c").join(name)
}

/// What a program prints natively, which is what it prints in loop-back.
#[track_caller]
fn as_natively(artifacts: &Artifacts, command: impl Fn(&Under<'_>) -> Command) -> String {
    let native = text(command(&Under::model(artifacts, "gfx906").unwrap()), LIMIT).unwrap();
    let daemon = Daemon::start(artifacts, "model:gfx906", &[]).unwrap();
    let ours = text(command(&Under::seam(artifacts, daemon.socket()).unwrap()), LIMIT)
        .unwrap_or_else(|error| panic!("{error:#}\n{}", daemon.report()));
    assert_eq!(native, ours);
    ours
}

/// Case C38. The thunk that is unloaded with its runtime leaves its files open, so that amdkfd refuses the next one (EBUSY of
/// `kfd_ioctl_acquire_vm()`) with this status, natively too.
#[test]
fn a_runtime_that_is_unloaded_starts_once_as_natively() {
    parts!(artifacts);
    for set in INSIDE {
        let root = match artifacts.packages(set) {
            Ok(root) => root,
            Err(error) => {
                println!("SKIP: package set {set}: {error:#}");
                continue;
            }
        };
        let runtime = runtime(&artifacts, set).unwrap();
        let program = CProgram::compile_alone(&root, &source("loads.c")).unwrap();
        let ours = as_natively(&artifacts, |under| under.command(&runtime, program.path()).unwrap());
        for line in [
            "start 0: 0",
            "memory: 0, queue: 0, they end: 0, 0",
            "end 0: 0, GPUs: 1",
            // HSA_STATUS_ERROR_OUT_OF_RESOURCES
            "start 1: 0x1008",
            "start 3: 0x1008",
        ] {
            assert!(ours.lines().any(|found| found == line), "{set}: {line}:\n{ours}");
        }
        assert!(ours.ends_with("threads more: 0, 16 MiB of addresses more: 0\n"), "{set}:\n{ours}");
    }
}

/// Cases C26, C29, C38, C42 and C46 with AMD's thunk: what it makes of the errors, the counts, the doorbells and the page of events that it
/// is given.
#[test]
fn amds_thunk_does_as_natively() {
    parts!(artifacts);
    let root = need!(artifacts.packages("rocm-trixie"));
    let printed = |name: &str, arguments: &[&str]| {
        let program = CProgram::compile(&root, &source(name), Place::Host).unwrap();
        as_natively(&artifacts, |under| {
            let mut command = program.command(under);
            command.args(arguments);
            command
        })
    };
    let queues = printed("queue_table.c", &[]);
    for line in ["a ring of 3000 bytes: ERROR", "32 doorbells: 0 not aligned, 0 twice, within 8 KiB: yes"] {
        assert!(queues.lines().any(|found| found == line), "{line}:\n{queues}");
    }
    let events = printed("events.c", &[]);
    for line in ["an event from before the topology has a slot: 1", "one of three sleepers: SUCCESS, soon"] {
        assert!(events.lines().any(|found| found == line), "{line}:\n{events}");
    }
    let opens = printed("openclose.c", &["20"]);
    for line in ["open again: KERNEL_ALREADY_OPENED", "8 threads: 0 failed calls"] {
        assert!(opens.lines().any(|found| found == line), "{line}:\n{opens}");
    }
}

/// Case C49: at the socket there is nobody, somebody who leaves at once, somebody of another kind. It is said why there is no device,
/// and nothing crashes.
#[test]
fn a_socket_that_is_no_daemons_is_a_clean_end() {
    parts!(artifacts);
    let [_, set] = INSIDE;
    need!(artifacts.packages(set));
    let runtime = runtime(&artifacts, set).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let listen = |name: &str| {
        let path = directory.path().join(name);
        (UnixListener::bind(&path).unwrap(), path)
    };
    let (listener, nobody) = listen("nobody");
    drop(listener);
    let (listener, leaves) = listen("leaves");
    std::thread::spawn(move || listener.incoming().for_each(drop));
    let (listener, talks) = listen("talks");
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            // Until the other end has had enough.
            while stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").is_ok() {}
        }
    });
    for (socket, said) in [
        (nobody, "connect: Connection refused"),
        // At which of its messages the library hears of it depends on who is first.
        (leaves, "(vhost-user): vhost-user: socket is broken"),
        (talks, "(vhost-user): vhost-user: invalid message"),
    ] {
        let under = Under::seam(&artifacts, &socket).unwrap();
        let output = run(under.command(&runtime, Path::new("rocminfo")).unwrap(), LIMIT).unwrap();
        let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{}: {text}", socket.display());
        assert!(text.contains("virtio-kfd: ") && text.contains(said), "{}: {text}", socket.display());
        assert!(text.contains("ROCk module is NOT loaded"), "{}: {text}", socket.display());
    }
}

/// The launcher as docs/operating.md installs it: by a link to it, and for programs that start elsewhere.
#[test]
fn the_launcher_finds_its_library_from_everywhere() {
    parts!(artifacts);
    let root = need!(artifacts.packages("rocm-trixie"));
    let program = CProgram::compile_alone(&root, &source("seam.c")).unwrap();
    let library = artifacts.program("libkfd_preload.so").unwrap();
    let daemon = Daemon::start(&artifacts, "model:gfx906", &[]).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let install = |name: &str| {
        let place = directory.path().join(name);
        std::fs::create_dir(&place).unwrap();
        let launcher = place.join("kfd-run");
        std::fs::copy(package_path("../guest-thunk/kfd-preload/kfd-run"), &launcher).unwrap();
        std::fs::copy(&library, place.join("libkfd_preload.so")).unwrap();
        launcher
    };
    let started = |launcher: &Path| {
        let mut command = Command::new(launcher);
        command.current_dir(directory.path()).env("VIRTIO_KFD_LOOPBACK", daemon.socket());
        command.env_remove("VIRTIO_KFD_PRELOAD");
        command.args(["sh", "-c", "cd / && exec \"$0\" alone"]).arg(program.path());
        run(command, LIMIT).unwrap()
    };
    let launcher = install("lib");
    let link = directory.path().join("link");
    std::os::unix::fs::symlink("lib/kfd-run", &link).unwrap();
    for launcher in [launcher.as_path(), &link, Path::new("./lib/kfd-run")] {
        let output = started(launcher);
        let said = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.starts_with("open: ok\n"), "{launcher:?}: {said}{errors}");
    }
    // ld.so(8) has no way to name it.
    let output = started(&install("a place"));
    assert_eq!(output.status.code(), Some(66));
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("takes a colon or a space for the end of a name")
    );
}

/// Without its library a program would run and find no GPU: the launcher does not start it.
#[test]
fn the_launcher_without_its_library() {
    let directory = tempfile::tempdir().unwrap();
    let launcher = directory.path().join("kfd-run");
    std::fs::copy(package_path("../guest-thunk/kfd-preload/kfd-run"), &launcher).unwrap();
    let started = |argument: &str| {
        let mut command = Command::new("sh");
        command.arg(&launcher).arg(argument).env_remove("VIRTIO_KFD_PRELOAD");
        let output = run(command, LIMIT).unwrap();
        let said = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
        (output.status.code(), said)
    };
    let (status, [out, errors]) = started("env");
    assert_eq!((status, out.as_str()), (Some(66), ""), "{errors}");
    assert!(errors.contains("/libkfd_preload.so") && errors.contains("VIRTIO_KFD_PRELOAD"), "{errors}");
    let (status, [out, errors]) = started("--help");
    assert_eq!((status, errors.as_str()), (Some(0), ""), "{out}");
    assert!(out.starts_with("usage: kfd-run PROGRAM"), "{out}");
    let (status, [out, errors]) = started("--verbose");
    assert_eq!((status, out.as_str()), (Some(64), ""), "{errors}");
    assert!(errors.starts_with("usage: kfd-run PROGRAM"), "{errors}");
}
