//! Kernels that go wrong (tests/wild): their own process learns of it, natively on the model and in loop-back alike, and
//! nobody else is harmed.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

#[path = "wild/ends.rs"]
mod ends;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use virtio_kfd_tests::gpu_program::{Optimisation, Release};
use virtio_kfd_tests::parts::package_path;
use virtio_kfd_tests::process::Keeper;
use virtio_kfd_tests::{Artifacts, Daemon, GpuPrograms, Under, need};

const GPU: &str = "gfx906";
const LIMIT: Duration = Duration::from_secs(120);

fn source() -> PathBuf {
    package_path("tests/wild/wild.hip")
}

/// How a run ended: its signal, and all that it printed.
struct End {
    signal: Option<i32>,
    code: Option<i32>,
    text: String,
}

fn run(under: &Under<'_>, programs: &GpuPrograms, program: &std::path::Path, kind: &str) -> End {
    use std::os::unix::process::ExitStatusExt;
    let directory = tempfile::tempdir().unwrap();
    let mut command = under.command(&programs.runtime(), program).unwrap();
    command.arg(kind);
    let log = directory.path().join("log");
    let keeper = Keeper::start(command, &log, LIMIT).unwrap();
    let status = keeper.wait().unwrap();
    let text = std::fs::read_to_string(&log).unwrap();
    End { signal: status.signal(), code: status.code(), text }
}

fn wait_for(process: &Keeper, text: &str) {
    let begin = Instant::now();
    while !process.output().contains(text) && begin.elapsed() < LIMIT && process.is_running() {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(process.output().contains(text), "{}", process.report());
}

macro_rules! parts {
    ($artifacts:ident, $programs:ident, $program:ident) => {
        let $artifacts = need!(Artifacts::for_thunk(&[], &[]));
        let $programs = need!(GpuPrograms::find(&$artifacts, Release::Trixie));
        let $program = $programs.hip(&source(), GPU, Optimisation::Full).unwrap();
    };
}

/// A neighbour runs right kernels all the time. (In loop-back each process is a guest of its own, so it is another VM's; a
/// neighbour of the same VM is in tests/qemu_hip.rs.)
#[test]
fn a_wild_kernel_is_reported_to_its_process_alone() {
    parts!(artifacts, programs, program);
    let model = Under::model(&artifacts, GPU).unwrap();
    let [daemon, other] = [(); 2].map(|()| Daemon::start(&artifacts, &format!("model:{GPU}"), &[]).unwrap());
    let loopback = Under::loopback(&artifacts, daemon.socket()).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let stop = directory.path().join("stop");
    let mut command =
        Under::loopback(&artifacts, other.socket()).unwrap().command(&programs.runtime(), &program).unwrap();
    command.arg("keep").arg(&stop);
    let log = directory.path().join("neighbour");
    let neighbour = Keeper::start(command, &log, 10 * LIMIT).unwrap();
    wait_for(&neighbour, "at work");
    const SIGABRT: i32 = 6;
    for (kind, said) in ends::ABORTED {
        for (place, under) in [("on the model", &model), ("in loop-back", &loopback)] {
            let end = run(under, &programs, &program, kind);
            assert!(
                end.signal == Some(SIGABRT) && end.text.contains(said),
                "{kind} {place}: {:?}\n{}\n{}",
                end.signal,
                end.text,
                daemon.report()
            );
        }
        // The daemon serves the next one as if nothing had been.
        let end = run(&loopback, &programs, &program, "fine");
        assert_eq!(end.code, Some(0), "after {kind}: {}\n{}", end.text, daemon.report());
    }
    for under in [&model, &loopback] {
        let end = run(under, &programs, &program, "absurd");
        assert_eq!((end.code, end.text.as_str()), (Some(1), ends::ABSURD));
    }
    std::fs::write(&stop, "").unwrap();
    let status = neighbour.wait().unwrap();
    let said = std::fs::read_to_string(&log).unwrap();
    assert_eq!((status.code(), &*said), (Some(0), ends::KEPT), "{}", other.report());
}

/// A kernel that never ends occupies its own process only, which can be killed; the daemon then serves the next guest. (In
/// loop-back each process is a guest of its own, so the neighbour here is another VM's; that of one VM is in
/// tests/qemu_hip.rs.)
#[test]
fn an_endless_kernel_harms_nobody_else() {
    parts!(artifacts, programs, program);
    let daemon = Daemon::start(&artifacts, &format!("model:{GPU}"), &[]).unwrap();
    let other = Daemon::start(&artifacts, &format!("model:{GPU}"), &[]).unwrap();
    let loopback = Under::loopback(&artifacts, daemon.socket()).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let mut command = loopback.command(&programs.runtime(), &program).unwrap();
    command.arg("loop");
    let endless = Keeper::start(command, &directory.path().join("log"), LIMIT).unwrap();
    wait_for(&endless, "loop");
    let neighbour = Under::loopback(&artifacts, other.socket()).unwrap();
    let end = run(&neighbour, &programs, &program, "fine");
    assert_eq!(end.code, Some(0), "beside the endless one: {}\n{}", end.text, other.report());
    assert!(endless.is_running(), "{}", endless.report());
    drop(endless);
    daemon.wait_for_workers(0, LIMIT).unwrap();
    let end = run(&loopback, &programs, &program, "fine");
    assert_eq!(end.code, Some(0), "afterwards: {}\n{}", end.text, daemon.report());
}
