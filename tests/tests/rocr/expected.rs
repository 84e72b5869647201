//! What `tests/c/rocr` prints, by rules that need no program, and how ours may differ from what it prints natively.

use virtio_kfd_tests::transcript::{Exception, Outcome};

/// Sizes of the pageable copies: powers of two up to 64 MiB, less one every second time from 8 on.
pub const CLASSES: u32 = 27;

/// Without `VIRTIO_KFD_REGISTER`.
pub const NOT_LOCKED: &[Exception] = &[Exception {
    section: "pageable",
    native: "hsa_amd_memory_lock: SUCCESS",
    ours: "hsa_amd_memory_lock: HSA_STATUS_ERROR",
    why: "memory of the application is not registered by default (docs/limits.md); the program stages",
}];

/// Bytes of a pageable copy.
pub fn class_size(class: u32) -> usize {
    (1 << class) - usize::from(class % 2 == 1 && class > 2)
}

/// splitmix64.
fn mix(seed: u64) -> u64 {
    let x = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

/// The data with this seed: the 8 bytes at 8 * i are mix(seed << 32 | i).
fn pattern(size: usize, seed: u64) -> Vec<u8> {
    let words = u64::try_from(size.div_ceil(8)).unwrap();
    let mut bytes: Vec<u8> = (0..words).flat_map(|word| mix(seed << 32 | word).to_le_bytes()).collect();
    bytes.truncate(size);
    bytes
}

/// FNV-1a over 64-bit words, the last one filled with zeros.
fn sum(bytes: &[u8]) -> u64 {
    bytes.chunks(8).fold(0xcbf2_9ce4_8422_2325, |sum: u64, chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        (sum ^ u64::from_le_bytes(word)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// What the section "copies" leaves on the host and in VRAM.
fn copied() -> (u64, u64) {
    const AREA: usize = 4 << 20;
    let from = pattern(AREA, 1);
    let (mut vram, mut host) = (from.clone(), vec![0; AREA]);
    let mut state = 1000;
    let mut next = |below: usize| -> usize {
        let number = mix(state);
        state += 1;
        usize::try_from(number % u64::try_from(below).unwrap()).unwrap()
    };
    for copy in 0..120 {
        let largest = match copy % 4 {
            0 => AREA / 2,
            1 => 64,
            _ => 5000,
        };
        let size = 1 + next(largest);
        let (source, target) = (next(AREA - size + 1), next(AREA - size + 1));
        if copy % 3 == 2 {
            host[target..target + size].copy_from_slice(&vram[source..source + size]);
        } else {
            vram[target..target + size].copy_from_slice(&from[source..source + size]);
        }
    }
    (sum(&host), sum(&vram))
}

/// What the section "kernels" leaves in the memory that was filled, and in that which was copied to within the GPU.
fn filled() -> (u64, u64) {
    const AREA: usize = 4 << 20;
    let (mut on, mut other) = (pattern(AREA, 9), vec![0; AREA]);
    let mut state = 5000;
    let mut next = |below: usize| -> usize {
        let number = mix(state);
        state += 1;
        usize::try_from(number % u64::try_from(below).unwrap()).unwrap()
    };
    for fill in 0..60 {
        let count = 1 + next(if fill % 3 == 0 { AREA / 8 } else { 3000 });
        let at = next(AREA / 4 - count + 1);
        let value = mix(fill).to_le_bytes();
        on[4 * at..4 * (at + count)].chunks_mut(4).for_each(|word| word.copy_from_slice(&value[..4]));
    }
    for copy in 0..40 {
        let size = 1 + next(if copy % 3 == 0 { AREA / 2 } else { 5000 });
        let (source, target) = (next(AREA - size + 1), next(AREA - size + 1));
        other[target..target + size].copy_from_slice(&on[source..source + size]);
    }
    (sum(&on), sum(&other))
}

/// All that the program prints with the argument "kernels" on one GPU.
pub fn kernels(name: &str) -> String {
    let (filled, copied) = filled();
    format!(
        "= agents
GPUs: 1
{name}, pool with flags 4
= kernels
synchronous copy to VRAM: SUCCESS
synchronous copy from VRAM: SUCCESS
fills, byte by byte: yes
filled: {filled:016x}
copies within the GPU, byte by byte: yes
within the GPU: {copied:016x}
a fill of the host's memory: yes
= end
failures: 0
"
    )
}

/// Lines that must be there.
fn computed() -> Vec<String> {
    let (host, vram) = copied();
    let mut lines = vec![
        format!("host: {host:016x}"),
        format!("VRAM: {vram:016x}"),
        format!("came back: {:016x}", sum(&pattern(65536, 2))),
    ];
    for class in 0..CLASSES {
        let size = class_size(class);
        let sum = sum(&pattern(size, u64::from(100 + class)));
        lines.push(format!("{size} bytes: {sum:016x}, the same, nothing else"));
    }
    lines
}

/// What the HSA specification says about barriers, waits and a packet for another kind of agent, and that all of the
/// program ran.
const SPECIFIED: &[&str] = &[
    "byte by byte: yes",
    "a copy waits: yes",
    "and then is done: yes",
    "it has times: yes",
    "a box: SUCCESS",
    "the box alone: yes",
    "one queue after the other: 300",
    "the second queue waits: yes",
    "a chain of: 64",
    "four of five do not do: yes",
    "five do: yes",
    "all of four wait, one of them does not: yes",
    "one of five, number 4: done",
    "a masked value that is too small: yes",
    "and one that is not: yes",
    // Cases C45 and C47.
    "the third waits for the first: yes",
    "and for the second: yes",
    "the second came before it: yes",
    "after ten times around: 0 are left",
    "all others are done: yes",
    "the first one stands: yes",
    "and goes on: yes",
    "a wait that ends by time: 1",
    "nobody was woken before: yes",
    "four sleepers are awake",
    "a handler had: 0",
    "access for all: SUCCESS",
    // Case C43, each once for the reason.
    "one for another kind of agent",
    "one of a reserved type",
    "one of an unknown format",
    "= end",
    "failures: 0",
];

/// Lines that must be there three times: for each packet that is none.
const FOR_EACH_WRONG_PACKET: &[&str] = &[
    "the callback: HSA_STATUS_ERROR_INVALID_PACKET_FORMAT",
    "for this queue: yes",
    "it is not done: yes",
    "the other queue runs, one error: yes",
];

/// With this in its environment the program does not ask whether those slept who waited: some thunks poll.
#[allow(dead_code, reason = "not all of those who use this file have such a thunk")]
pub const POLLS: &str = "ROCR_WAITS_POLL";

/// That all is there as often as it must.
#[track_caller]
pub fn check(place: &str, outcome: &Outcome) {
    check_with("they slept: yes", place, outcome);
}

/// The same where [`POLLS`] was set.
#[allow(dead_code, reason = "as above")]
#[track_caller]
pub fn check_polling(place: &str, outcome: &Outcome) {
    check_with("they slept: not asked", place, outcome);
}

#[track_caller]
fn check_with(slept: &str, place: &str, outcome: &Outcome) {
    let computed = computed();
    let once = computed.iter().map(String::as_str).chain(SPECIFIED.iter().copied()).chain([slept]);
    let once = once.map(|line| (line, 1));
    for (line, times) in once.chain(FOR_EACH_WRONG_PACKET.iter().map(|line| (*line, 3))) {
        let count = outcome.lines.iter().filter(|found| *found == line).count();
        assert_eq!(count, times, "{place}: {line:?} in\n{}", outcome.lines.join("\n"));
    }
}

/// All that the section "dispatches" prints on a GPU of this name. The statuses are those of ROCr's
/// `AqlQueue::DynamicQueueEventsHandler` for what the packet processor found.
pub fn dispatches(name: &str) -> String {
    let mut text =
        format!("= agents\nGPUs: 1\n{name}, pool with flags 4\n= dispatches\na good one is done\n");
    let mut wrong = |what: &str, status: &str| {
        text.push_str(&format!(
            "{what}
the callback: HSA_STATUS_ERROR_{status}
for this queue: yes
it is not done: yes
the other queue runs, one error: yes
"
        ));
    };
    wrong("65535 x 65535 x 65535 work-items in a workgroup", "INVALID_ARGUMENT");
    wrong("1025 work-items in a workgroup", "INVALID_ARGUMENT");
    wrong("no dimensions", "INCOMPATIBLE_ARGUMENTS");
    for _ in 0..3 {
        wrong("a grid of nothing", "INCOMPATIBLE_ARGUMENTS");
        wrong("workgroups of nothing", "INCOMPATIBLE_ARGUMENTS");
    }
    wrong("4 GiB of group memory", "INVALID_ALLOCATION");
    wrong("no kernel", "INVALID_CODE_OBJECT");
    text.push_str(
        "beside an endless grid one is done
the endless one is not: yes
its queue is destroyed
and another one is done
= end
failures: 0
",
    );
    text
}
