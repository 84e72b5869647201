//! The whole stack: an unmodified guest in QEMU, its own virtio_gpu driver, daemon and workers on the model.
//!
//! One guest for all of it, since a guest on an emulated CPU takes seconds to boot; the parts run in order and the
//! message of a failure begins with the part's name.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use virtio_kfd_tests::c_program::Place;
use virtio_kfd_tests::conformance::FORKS;
use virtio_kfd_tests::guest::Running;
use virtio_kfd_tests::native::{runtime, text};
use virtio_kfd_tests::parts::{Part, kernel_complaints, package_path, run_parts, user};
use virtio_kfd_tests::rocminfo::{agents, differences, gpus, system};
use virtio_kfd_tests::{Artifacts, CProgram, Command, Daemon, Guest, Under, Vm, need};

const SET: &str = "rocm-trixie";
const PROFILE: &str = "gfx906";
const LIMIT: Duration = Duration::from_secs(180);

/// What the end of a guest process takes at the most on the host, from the moment at which the guest has it behind it, where the
/// machine has nothing else to do.
const SECOND: Duration = Duration::from_secs(1);

/// The same where others want the CPUs as well.
const SOON: Duration = Duration::from_secs(30);

/// Where the test programs lie in the guest.
const PROGRAMS: &str = "/opt/virtio-kfd";

/// Programs on the thunk's API that must print the same in the guest as natively on the host.
const C_PROGRAMS: &[&str] = &["events", "openclose", "topology"];

/// Lines of a GPU's section of rocminfo that may differ between native and in the guest: none.
const GPU_MAY_DIFFER: &[&str] = &[];

struct Stack {
    artifacts: Artifacts,
    daemon: Daemon,
    guest: Guest,
}

fn source(name: &str) -> PathBuf {
    package_path(&format!("tests/c/{name}.c"))
}

impl Stack {
    /// What a shell script prints in the guest, run by an ordinary user; it must succeed.
    #[track_caller]
    fn run(&self, script: &str) -> String {
        self.try_run(script).unwrap_or_else(|error| panic!("{script}: {error:#}\n{}", self.daemon.report()))
    }

    fn try_run(&self, script: &str) -> anyhow::Result<String> {
        let output = self.guest.run(&user(script).limit(LIMIT))?.checked()?;
        Ok(output.text())
    }

    fn spawn(&self, script: &str) -> Running {
        self.guest.spawn(&user(script).limit(LIMIT)).unwrap()
    }

    fn start_neighbour(&self) -> Running {
        // Its input ends when the sleep is killed.
        let mut neighbour = self.spawn(&format!("sleep 1000 | {PROGRAMS}/kfd-hostile neighbour"));
        neighbour
            .wait_for("ready", LIMIT)
            .unwrap_or_else(|error| panic!("{error:#}\n{}", self.daemon.report()));
        neighbour
    }

    fn end_neighbour(&self, neighbour: Running) {
        self.run("killall sleep");
        let output = neighbour.wait().unwrap();
        assert!(output.success() && output.text().contains("all answers right"), "{output}");
        println!("    {}", output.text().lines().last().unwrap_or_default());
    }
}

/// D10: the CPU agent is the guest's own. Everything else is as on the host.
fn rocminfo_shows_the_native_gpu(stack: &Stack) {
    let under = Under::model(&stack.artifacts, PROFILE).unwrap();
    let runtime = runtime(&stack.artifacts, SET).unwrap();
    let native = text(under.command(&runtime, Path::new("rocminfo")).unwrap(), LIMIT).unwrap();
    let begin = Instant::now();
    let ours = stack.run("rocminfo");
    println!("    rocminfo took {:?} in the guest", begin.elapsed());
    let (native_gpus, our_gpus) = (gpus(&native), gpus(&ours));
    assert_eq!((native_gpus.len(), our_gpus.len()), (1, 1), "{ours}");
    assert_eq!(our_gpus[0].value("Name"), Some(PROFILE));
    let differ = differences(&native_gpus[0], &our_gpus[0], GPU_MAY_DIFFER);
    assert!(differ.is_empty(), "native | guest\n{}", differ.join("\n"));
    assert_eq!(system(&native), system(&ours));
    let cpus = agents(&ours);
    assert_eq!(cpus.len(), 2, "{ours}");
    assert_eq!(cpus[0].value("Device Type"), Some("CPU"));
    assert_eq!(cpus[0].value("Compute Unit"), Some("2"), "the guest's two CPUs:\n{ours}");
    assert_ne!(cpus[0], agents(&native)[0], "this machine's CPU is not the guest's");
}

/// Case C49: a CPU that is offline.
fn an_offline_cpu_is_no_obstacle(stack: &Stack) {
    let before = gpus(&stack.run("rocminfo"));
    let cpu1 = |online: &str| {
        let script = format!("echo {online} > /sys/devices/system/cpu/cpu1/online");
        stack.guest.run(&Command::shell(&script)).unwrap().checked().unwrap();
    };
    cpu1("0");
    let with_one = stack.try_run("rocminfo");
    cpu1("1");
    let with_one = with_one.unwrap();
    assert_eq!(agents(&with_one)[0].value("Compute Unit"), Some("1"), "{with_one}");
    assert_eq!(gpus(&with_one), before);
}

/// Cases C26, C29, C38, C51, C53 through the guest's driver.
fn c_programs_print_what_they_print_natively(stack: &Stack) {
    let root = stack.artifacts.packages(SET).unwrap();
    for name in C_PROGRAMS {
        let host = CProgram::compile(&root, &source(name), Place::Host).unwrap();
        let native = text(host.command(&Under::model(&stack.artifacts, PROFILE).unwrap()), LIMIT)
            .unwrap_or_else(|error| panic!("{name} natively: {error:#}"));
        let begin = Instant::now();
        let ours = stack.run(&format!("{PROGRAMS}/{name}"));
        println!("    {name}: {} lines in {:?}", ours.lines().count(), begin.elapsed());
        let expected: Vec<String> = native.lines().filter_map(|line| expected_in_guest(name, line)).collect();
        let ours: Vec<&str> = ours.lines().filter(|line| compared(name, line)).collect();
        assert_eq!(ours, expected, "{name}");
    }
}

/// The page of HDP flush registers, for programs that ask for it.
fn a_flush_is_over_before_the_next_instruction(stack: &Stack) {
    let root = stack.artifacts.packages(SET).unwrap();
    for name in ["topology", "hdp"] {
        let host = CProgram::compile(&root, &source(name), Place::Host).unwrap();
        let native = text(host.command(&Under::model(&stack.artifacts, PROFILE).unwrap()), LIMIT)
            .unwrap_or_else(|error| panic!("{name} natively: {error:#}"));
        assert!(native.contains("heap 7,") || native.contains("a page of 4096 bytes\n"), "{native}");
        assert_eq!(stack.run(&format!("VIRTIO_KFD_HDP=trap {PROGRAMS}/{name}")), native, "{name}");
    }
    println!("    {}", stack.run(&format!("VIRTIO_KFD_HDP=trap {PROGRAMS}/hdp cost 200")).trim_end());
}

/// A line of a program's native output as it must be in a guest.
fn expected_in_guest(name: &str, line: &str) -> Option<String> {
    // HSA_HEAPTYPE_MMIO_REMAP: nobody has asked for the page (VIRTIO_KFD_HDP).
    if name == "topology" && line.starts_with("  bank: heap 7,") || !compared(name, line) {
        return None;
    }
    Some(line.to_owned())
}

/// What the native library keeps for itself between rounds is its own affair.
fn compared(name: &str, line: &str) -> bool {
    !(name == "openclose" && line.contains(" grew by "))
}

/// Cases C32 and C34; in loop-back see loopback_vm.rs.
fn children_of_fork_work(stack: &Stack) {
    assert_eq!(stack.run(&format!("{PROGRAMS}/forks")), FORKS);
    stack.daemon.wait_for_workers(0, SOON).unwrap();
}

/// Two guest processes; one is killed, the other goes on.
fn a_killed_guest_process_leaves_nothing_and_disturbs_nobody(stack: &Stack) {
    assert!(stack.daemon.workers().is_empty(), "nothing runs yet");
    let neighbour = stack.start_neighbour();
    let of_neighbour = stack.daemon.workers();
    assert_eq!(of_neighbour.len(), 1);
    let before = stack.daemon.holdings().unwrap().descriptors;
    let mut shortest = SOON;
    for round in 0..5 {
        let mut held = stack.spawn(&format!("echo pid $$; exec {PROGRAMS}/kfd-hostile hold"));
        held.wait_for("ready", LIMIT).unwrap();
        let workers: BTreeSet<u32> = stack.daemon.workers().difference(&of_neighbour).copied().collect();
        assert_eq!(workers.len(), 1, "round {round}: a worker of its own");
        // Not su, which is the agent's child, but the program itself.
        let script = "p=$(pidof kfd-hostile | tr ' ' '\\n' | while read p; do \
                      grep -qz hold /proc/$p/cmdline && echo $p; done); kill -9 $p; \
                      while [ -e /proc/$p ]; do :; done";
        stack.guest.run(&Command::shell(script).limit(LIMIT)).unwrap().checked().unwrap();
        let took = stack.daemon.wait_for_workers(1, SOON).unwrap();
        shortest = shortest.min(took);
        // Dead is not yet reaped.
        let place = format!("/proc/{}", workers.first().unwrap());
        let begin = Instant::now();
        while Path::new(&place).exists() {
            assert!(begin.elapsed() < SOON, "round {round}: the worker is not reaped");
            std::thread::sleep(Duration::from_millis(2));
        }
        // Its host blob, its channel, its fences.
        while stack.daemon.holdings().unwrap().descriptors != before {
            assert!(
                begin.elapsed() < SOON,
                "round {round}: descriptors, {before} before: {:?}",
                stack.daemon.holdings()
            );
            std::thread::sleep(Duration::from_millis(2));
        }
        assert_eq!(stack.daemon.workers(), of_neighbour);
        held.wait().unwrap();
    }
    println!("    the worker of a killed guest process was gone after {shortest:?} at best");
    assert!(shortest < SECOND, "{shortest:?}");
    stack.end_neighbour(neighbour);
    stack.daemon.wait_for_workers(0, SOON).unwrap();
}

/// 500 times open, take resources, close.
fn five_hundred_rounds_leave_nothing_behind(stack: &Stack) {
    let rounds = |count: u32| {
        let begin = Instant::now();
        assert_eq!(
            stack.run(&format!("{PROGRAMS}/kfd-hostile rounds {count}")),
            format!("rounds: {count}\n")
        );
        stack.daemon.wait_for_workers(0, SOON).unwrap();
        println!("    {count} rounds took {:?}", begin.elapsed());
        stack.daemon.settled(LIMIT).unwrap()
    };
    let few = rounds(20);
    let many = rounds(500);
    println!("    after 20 {few:?}, after 500 {many:?}");
    assert_eq!((many.processes, many.descriptors), (few.processes, few.descriptors));
    assert!(many.mappings <= few.mappings + 40, "{few:?}, {many:?}");
    assert!(many.private_kib <= few.private_kib + 8 * 1024, "{few:?}, {many:?}");
}

/// A guest process that sends garbage, beside one that behaves.
fn garbage_is_refused_and_nobody_notices(stack: &Stack) {
    let neighbour = stack.start_neighbour();
    let begin = Instant::now();
    let seen = stack.run(&format!("{PROGRAMS}/kfd-hostile attack 4 120"));
    println!("{seen}    took {:?}", begin.elapsed());
    assert!(seen.contains("none accepted") && seen.contains("all answers right"), "{seen}");
    stack.end_neighbour(neighbour);
    assert!(stack.daemon.is_running() && stack.guest.vm().is_running());
    assert!(!stack.daemon.log().contains("panicked"), "{}", stack.daemon.report());
    stack.daemon.wait_for_workers(0, SOON).unwrap();
    assert_eq!(gpus(&stack.run("rocminfo")).len(), 1, "a new process works");
    assert_eq!(kernel_complaints(&stack.guest).unwrap(), "", "the guest's kernel");
}

#[test]
fn the_whole_stack_in_a_guest() {
    let artifacts = need!(Artifacts::for_guest(&["kfd-hostile"], &[SET]));
    let mut builder = Vm::builder(&artifacts).unwrap();
    need!(artifacts.thunk());
    let root = artifacts.packages(SET).unwrap();
    let hostile = artifacts.program("kfd-hostile").unwrap();
    let place = |name: &str| format!("{}/{name}", PROGRAMS.trim_start_matches('/'));
    builder.overlay().file(&place("kfd-hostile"), &hostile).unwrap();
    // The image is written at the boot; until then the files must be there.
    let compile =
        |name: &&'static str| (*name, CProgram::compile(&root, &source(name), Place::Guest).unwrap());
    let programs: Vec<(&str, CProgram)> = C_PROGRAMS.iter().chain(&["forks", "hdp"]).map(compile).collect();
    for (name, program) in &programs {
        builder.overlay().file(&place(name), program.path()).unwrap();
    }
    let daemon = Daemon::start(&artifacts, &format!("model:{PROFILE}"), &[]).unwrap();
    let guest = builder.module("amdgpu").limit(Duration::from_secs(540)).boot_on(&daemon).unwrap();
    // udev's rules for GPUs, without udev. (/dev/kfd is the guest's own, without a GPU; rocminfo asks whether it may open it.)
    let nodes = format!("chmod 666 /dev/dri/renderD* /dev/kfd; chmod 755 {PROGRAMS}");
    guest.run(&Command::shell(&nodes)).unwrap().checked().unwrap();
    let stack = Stack { artifacts, daemon, guest };

    let parts: &[Part<Stack>] = &[
        ("rocminfo shows the native GPU", rocminfo_shows_the_native_gpu),
        ("an offline CPU is no obstacle", an_offline_cpu_is_no_obstacle),
        ("C programs print what they print natively", c_programs_print_what_they_print_natively),
        ("a flush is over before the next instruction", a_flush_is_over_before_the_next_instruction),
        ("children of fork work", children_of_fork_work),
        ("a killed guest process", a_killed_guest_process_leaves_nothing_and_disturbs_nobody),
        ("500 rounds", five_hundred_rounds_leave_nothing_behind),
        ("garbage", garbage_is_refused_and_nobody_notices),
    ];
    let failed = run_parts(&stack, parts, |stack| {
        // What it left running would only make the next parts fail too.
        let _ = stack.guest.run(&Command::shell("killall sleep kfd-hostile; true"));
        let _ = stack.daemon.wait_for_workers(0, LIMIT);
    });

    // The end of the VM is the end of all it held; the daemon waits for the next one.
    let Stack { daemon, guest, .. } = stack;
    guest.kill();
    daemon.wait_for_workers(0, SOON).unwrap();
    assert!(daemon.is_running());
    assert!(failed.is_empty(), "{failed:?}\n{}", daemon.report());
}
