//! Memory in guests in QEMU: the conformance suite ([`virtio_kfd_tests::conformance`]), rounds of allocations by several
//! processes of one VM, and memory that is plugged in and out.
//!
//! One guest for all of it; a failure's message begins with the part's name.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

use std::time::{Duration, Instant};

use serde_json::json;
use virtio_kfd_tests::c_program::Place;
use virtio_kfd_tests::conformance::{
    EXCEPTIONS, EXCEPTIONS_OF_GUESTS, NOT_REGISTERED, REGISTER, ROUNDS_LEAVE, SECTIONS, SECTIONS_OF_GUESTS,
    SET, SYSTEM_MEMORY_OF_GUESTS, compile, from_heading, in_guest, native, wanted,
};
use virtio_kfd_tests::parts::{OPEN_TO_USERS, Part, kernel_complaints, package_path, run_parts, user};
use virtio_kfd_tests::qmp::Qmp;
use virtio_kfd_tests::transcript::compare;
use virtio_kfd_tests::{Artifacts, CProgram, Command, Daemon, Guest, Vm, need};

/// Two GPUs, so that what is told of several nodes goes through the guest's driver as well.
const PROFILE: &str = "gfx906x2";

/// Where the programs lie in the guest.
const PROGRAM: &str = "/opt/virtio-kfd/memory";
const ROUNDS_PROGRAM: &str = "/opt/virtio-kfd/rounds";

const LIMIT: Duration = Duration::from_secs(240);

/// Rounds of each process; [`ROUNDS_VARIABLE`] asks for more than an emulated CPU does in reasonable time.
const ROUNDS: u32 = 250;
const ROUNDS_VARIABLE: &str = "VIRTIO_KFD_TEST_ROUNDS";
const PROCESSES: usize = 4;
const THREADS: u32 = 8;

/// Memory that is plugged in, in MiB.
const PLUGGED: u64 = 1024;

struct Stack {
    artifacts: Artifacts,
    daemon: Daemon,
    guest: Guest,
    program: CProgram,
}

impl Stack {
    /// What a shell script of root's prints; it must succeed.
    #[track_caller]
    fn root(&self, script: &str) -> String {
        self.guest.run(&Command::shell(script).limit(LIMIT)).unwrap().checked().unwrap().text()
    }
}

fn the_suite_prints_what_it_prints_natively(stack: &Stack) {
    let mut failed = Vec::new();
    let variables = &[REGISTER, SYSTEM_MEMORY_OF_GUESTS];
    let exceptions = [EXCEPTIONS, EXCEPTIONS_OF_GUESTS].concat();
    for section in SECTIONS.iter().chain(SECTIONS_OF_GUESTS).filter(|section| wanted(section)) {
        let begin = Instant::now();
        let native = native(&stack.artifacts, &stack.program, PROFILE, section, variables).unwrap();
        let took = begin.elapsed();
        let nothing = &mut |_: &str| Ok(0);
        let ours = in_guest(&stack.guest, PROGRAM, &stack.daemon, section, variables, nothing).unwrap();
        println!("    {section}: natively {took:?}, in the guest {:?}", begin.elapsed() - took);
        if let Err(error) = compare(&native, &ours, &exceptions) {
            failed.push(format!("{section}: {error:#}"));
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// What a process prints of a shared handle that another one made, which is no longer good or never was.
const NO_HANDLE: &str = "register a shared handle = ERROR, size 0
a forged handle, word 0 = ERROR
a forged handle, word 1 = ERROR
a forged handle, word 2 = ERROR
a forged handle, word 3 = ERROR
a forged handle, word 4 = ERROR
a forged handle, word 5 = ERROR
a forged handle, word 6 = ERROR
a forged handle, word 7 = ERROR
";

/// What the section `share` prints for one kind of memory. `with_handle` is what the other process prints.
fn shared(node: u32, flags: &str, status: &str, with_handle: &str, afterwards: &str) -> String {
    format!(
        "== {flags}
alloc a(node {node}, size 0x400000, align 0, {flags}) = SUCCESS, address aligned
map(a, 0x400000) = SUCCESS, alternate NULL
gpu 0 writes 0x400000 bytes of a: done
share(a+0x100000) = INVALID_PARAMETER
share without a handle = INVALID_PARAMETER
share(a) = {status}
{with_handle}{afterwards}register its own handle = ERROR
info(a) = SUCCESS, type allocated, node {node}, flags {flags}, cpu a, gpu a, size 0x400000, registered 0 NULL, \
         mapped 2 {{1 2}}, data NULL
unmap(a) = SUCCESS
free(a, 0x400000) = SUCCESS
after free:
{NO_HANDLE}"
    )
}

/// What the other process prints of a good handle: what it is told, that both reach the same memory, opened twice.
fn opened(flags: &str) -> String {
    let forged = NO_HANDLE.split_once('\n').unwrap().1;
    format!(
        "register a shared handle = SUCCESS, size 0x400000
{forged}info(b) = SUCCESS, type shared, node 1, flags {flags}, cpu NULL, gpu b, size 0x400000, registered 0 NULL, \
         mapped 0 NULL, data NULL
map(b, 0x400000) = SUCCESS, alternate NULL
gpu 0 reads 0x400000 bytes of b: same
gpu 0 writes 0x400000 bytes of b: done
register it again = SUCCESS, another address
info(c) = SUCCESS, type shared, node 1, flags {flags}, cpu NULL, gpu c, size 0x400000, registered 1 {{1}}, \
         mapped 0 NULL, data NULL
map(c, 0x400000) = SUCCESS, alternate NULL
gpu 0 reads 0x400000 bytes of c: same
unmap(c) = SUCCESS
deregister(c) = SUCCESS
gpu 0 reads 0x400000 bytes of b: same
unmap(b) = SUCCESS
deregister(b) = SUCCESS
deregister(b) = MEMORY_NOT_REGISTERED
"
    )
}

/// Handles as bytes (cases C17 and C22). Natively they need ioctls of AMD's own driver (AMDKFD_IOC_IPC_*) that no upstream
/// kernel has, so there every call fails. In a guest they work for memory of a GPU's node; statuses and what pointers tell
/// are those of fmm_share_memory and fmm_register_shared_memory; a forged handle is refused, and one's own.
fn handles_are_shared_as_bytes(stack: &Stack) {
    let native = native(&stack.artifacts, &stack.program, PROFILE, "share", &[]).unwrap();
    assert!(native.error.is_none(), "{:?}", native.error);
    for line in native.lines.iter().filter(|line| line.contains("share") || line.contains("handle")) {
        let refused = ["= ERROR", "= ERROR, size 0", "= INVALID_PARAMETER", "= INVALID_PARAMETER, size 0"];
        assert!(line == "= share" || refused.iter().any(|end| line.ends_with(end)), "natively: {line}");
    }
    let nothing = &mut |_: &str| Ok(0);
    let ours = in_guest(&stack.guest, PROGRAM, &stack.daemon, "share", &[], nothing).unwrap();
    assert!(ours.error.is_none(), "{:?}", ours.error);
    let mut expected = String::new();
    for flags in ["NonPaged|Coarse", "NonPaged|HostAccess|Coarse", "NonPaged|HostAccess"] {
        let seen = "gpu 0 reads 0x400000 bytes of a: same\n";
        expected.push_str(&shared(1, flags, "SUCCESS", &opened(flags), seen));
    }
    // A dma-buf is the way for system memory.
    expected.push_str(&shared(0, "HostAccess", "NOT_SUPPORTED", NO_HANDLE, ""));
    expected.push_str(
        "share(NULL) = INVALID_PARAMETER
register a handle of zeros = ERROR
register no handle = INVALID_PARAMETER
close = SUCCESS
the other process: exit 0
close = SUCCESS",
    );
    assert_eq!(from_heading(&ours.lines).join("\n"), expected);
}

/// Case C21. Natively no handle can be made (see above), so what is expected is what the call promises.
fn processes_with_the_same_number_share_memory(stack: &Stack) {
    let nothing = &mut |_: &str| Ok(0);
    let ours = in_guest(&stack.guest, PROGRAM, &stack.daemon, "pids", &[], nothing).unwrap();
    assert!(ours.error.is_none(), "{:?}\n{}", ours.error, ours.lines.join("\n"));
    let expected = [
        "== processes with the same number",
        "process 0: number 1, share = SUCCESS",
        "process 1: number 1, share = SUCCESS",
        "two handles: yes",
        "open the handle of process 0 = SUCCESS, size 0x10000",
        "open the handle of process 1 = SUCCESS, size 0x10000",
        "gpu 0 reads 0x10000 bytes of memory 0: same",
        "gpu 0 reads 0x10000 bytes of memory 1: same",
        "close it = SUCCESS",
        "process 0: exit 0",
        "close it = SUCCESS",
        "process 1: exit 0",
        "close = SUCCESS",
    ];
    assert_eq!(from_heading(&ours.lines), expected);
}

/// The calls that differ by default, without the opt-in.
fn registration_is_refused_by_default(stack: &Stack) {
    let nothing = &mut |_: &str| Ok(0);
    let found = in_guest(&stack.guest, PROGRAM, &stack.daemon, "register-default", &[], nothing).unwrap();
    assert!(found.error.is_none(), "{:?}", found.error);
    assert_eq!(from_heading(&found.lines), NOT_REGISTERED);
}

/// Several processes of one VM at once, all of them with several threads.
fn rounds_leave_nothing_behind(stack: &Stack) {
    let rounds = std::env::var(ROUNDS_VARIABLE).ok().and_then(|text| text.parse::<u32>().ok());
    let run = |rounds: u32| {
        let command = user(&format!("exec {ROUNDS_PROGRAM} {rounds} {THREADS} beside")).limit(LIMIT);
        let running: Vec<_> = (0..PROCESSES).map(|_| stack.guest.spawn(&command).unwrap()).collect();
        for process in running {
            let output = process.wait().unwrap().checked().unwrap();
            assert_eq!(output.text(), ROUNDS_LEAVE.replace("VRAM: 0 MiB less\n", ""), "{output}");
        }
        stack.daemon.settled(LIMIT).unwrap()
    };
    let vram = || {
        let command = user(&format!("exec {ROUNDS_PROGRAM} 0 1")).limit(LIMIT);
        stack.guest.run(&command).unwrap().checked().unwrap().text()
    };
    let before = run(16);
    let before_vram = vram();
    let begin = Instant::now();
    let rounds = rounds.map_or(ROUNDS, |all| all / PROCESSES as u32);
    let after = run(rounds);
    println!("    {PROCESSES} processes, {rounds} rounds each: {:?}", begin.elapsed());
    println!("    {before:?}, after it {after:?}");
    assert_eq!(vram(), before_vram);
    assert_eq!((after.processes, after.descriptors), (before.processes, before.descriptors));
    assert!(after.mappings <= before.mappings + 16, "{before:?}, {after:?}");
    assert!(after.private_kib <= before.private_kib + 8 * 1024, "{before:?}, {after:?}");
}

/// Free memory of the guest in MiB.
fn free(stack: &Stack) -> u64 {
    let text = stack.root("awk '/^MemAvailable/ { print int($2 / 1024) }' /proc/meminfo");
    text.trim().parse().unwrap()
}

/// Plugs memory in, in MiB.
fn plug(monitor: &mut Qmp, name: &str, size: u64) -> anyhow::Result<()> {
    let backend = format!("{name}-memory");
    let memory =
        json!({ "qom-type": "memory-backend-memfd", "id": backend, "size": size << 20, "share": true });
    monitor.execute("object-add", memory)?;
    monitor.execute("device_add", json!({ "driver": "pc-dimm", "id": name, "memdev": backend }))?;
    Ok(())
}

/// Case C70. The new memory is the kernel's, so that buffers can lie in it; then the guest cannot give it back while
/// they do.
fn memory_is_plugged_in_and_out(stack: &Stack) {
    let online = |how: &str| {
        stack.root(&format!("echo {how} > /sys/devices/system/memory/auto_online_blocks"));
    };
    let mut monitor = stack.guest.vm().monitor().unwrap();
    let total = "awk '/^MemTotal/ { print int($2 / 1024) }' /proc/meminfo";
    let small: u64 = stack.root(total).trim().parse().unwrap();
    let wait_for_memory = |least: u64| {
        let wait = format!("while [ $({total}) -lt {least} ]; do sleep 0.1; done");
        stack.guest.run(&Command::shell(&wait).limit(LIMIT))?.checked()
    };
    let mut asked = Vec::new();
    let act = &mut |what: &str| match what {
        "plugged" => {
            // Memory that only movable pages may lie in goes out again, as the guest's kernel is free to do.
            online("online_movable");
            plug(&mut monitor, "visitor", PLUGGED / 4)?;
            wait_for_memory(small + PLUGGED / 5)?;
            monitor.execute("device_del", json!({ "id": "visitor" }))?;
            let gone = monitor.wait_for(&["DEVICE_DELETED"], Duration::from_secs(60))?;
            assert!(gone.is_some(), "memory without buffers in it stays");
            online("online_kernel");
            plug(&mut monitor, "guest", PLUGGED)?;
            wait_for_memory(small + PLUGGED * 9 / 10)?;
            // More than the memory before has.
            let size = free(stack).saturating_sub(PLUGGED / 4);
            assert!(size > small, "{size} MiB are to lie in {small} MiB and new memory");
            Ok(size)
        }
        _ => {
            monitor.execute("device_del", json!({ "id": "guest" }))?;
            let answers = ["DEVICE_DELETED", "MEM_UNPLUG_ERROR", "DEVICE_UNPLUG_GUEST_ERROR"];
            // A guest's kernel may also try it for ever.
            let answer = monitor.wait_for(&answers, Duration::from_secs(10))?;
            asked.push(format!("{what}: {answer:?}"));
            Ok(0)
        }
    };
    let ours = in_guest(&stack.guest, PROGRAM, &stack.daemon, "hotplug", &[], act).unwrap();
    println!("    {asked:?}\n    {}", ours.lines.join("\n    "));
    assert!(ours.error.is_none(), "{:?}", ours.error);
    let expected = [
        "before: 2 of 2 pieces right",
        "plugged in: 2 of 2 pieces right",
        "all asked for: yes",
        "with new memory: all right",
        "after the machine was asked for it back: all right",
        "pieces that the GPU does not reach: 0",
        "at the end: 2 of 2 pieces right",
        "anew: 4 of 4 pieces right",
    ];
    let found: Vec<&str> =
        ours.lines.iter().map(String::as_str).filter(|line| expected.contains(line)).collect();
    assert_eq!(found, expected, "{}", ours.lines.join("\n"));
    assert!(!asked[0].contains("DEVICE_DELETED"), "memory with live buffers in it is gone: {asked:?}");
}

#[test]
fn memory_in_a_guest() {
    let artifacts = need!(Artifacts::for_guest(&[], &[SET]));
    let mut builder = Vm::builder(&artifacts).unwrap();
    need!(artifacts.thunk());
    let root = artifacts.packages(SET).unwrap();
    let program = compile(&root, Place::Host).unwrap();
    // The image is written at the boot; until then the files must be there.
    let in_guest = compile(&root, Place::Guest).unwrap();
    let rounds = CProgram::compile(&root, &package_path("tests/c/rounds.c"), Place::Guest).unwrap();
    builder.overlay().file(PROGRAM.trim_start_matches('/'), in_guest.path()).unwrap();
    builder.overlay().file(ROUNDS_PROGRAM.trim_start_matches('/'), rounds.path()).unwrap();
    let daemon = Daemon::start_watched(&artifacts, &format!("model:{PROFILE}"), &[]).unwrap();
    let guest =
        builder.memory_mib(1536).memory_slots(4096).limit(Duration::from_secs(540)).boot_on(&daemon).unwrap();
    let stack = Stack { artifacts, daemon, guest, program };
    stack.root(OPEN_TO_USERS);

    let parts: &[Part<Stack>] = &[
        ("the suite prints what it prints natively", the_suite_prints_what_it_prints_natively),
        ("handles are shared as bytes", handles_are_shared_as_bytes),
        ("processes with the same number share memory", processes_with_the_same_number_share_memory),
        ("registration is refused by default", registration_is_refused_by_default),
        ("rounds leave nothing behind", rounds_leave_nothing_behind),
        ("memory is plugged in and out", memory_is_plugged_in_and_out),
    ];
    let failed = run_parts(&stack, parts, |_| {});
    assert!(stack.guest.vm().is_running(), "{}", stack.guest.vm().report());
    assert_eq!(kernel_complaints(&stack.guest).unwrap(), "", "the guest's kernel");
    assert!(failed.is_empty(), "{failed:?}\n{}", stack.daemon.report());
}
