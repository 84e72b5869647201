//! Malformed chains and rings.

use std::collections::BTreeSet;

use vhost::VhostBackend;
use virtio_kfd_protocol::calls::{FreeMemory, ImportMemory, Nop, ShareMemory};
use virtio_kfd_protocol::{
    BufferRequest, Handle, ImportMemoryRequest, ResourceId, ShareMemoryRequest, ShareToken,
};

use crate::daemon::{Daemon, open_files, wait_for, wait_for_some};
use crate::gpu::*;
use crate::stub;
use crate::vmm::*;

crate::tests![
    a_malformed_chain_comes_back_empty,
    short_responses,
    chains_in_tables_and_in_pieces,
    a_ring_that_jumps_stands_still_until_it_is_set_up_again,
    the_cursor_queue_is_emptied,
    notifications_by_index,
    random_commands_do_no_harm,
];

const A: u64 = SCRATCH;
const B: u64 = SCRATCH + 0x1000;
const TABLE: u64 = SCRATCH + 0x2000;

/// Descriptors from here on are not used by [`Vmm::command`] before its 100th command.
const HEAD: u16 = 200;

fn desc(addr: u64, len: u32, flags: u16, next: u16) -> Desc {
    Desc { addr, len, flags, next }
}

/// Offers a chain of these descriptors, from HEAD on, and returns what was written into it.
fn offer(vmm: &mut Vmm, descs: &[Desc]) -> u32 {
    for (index, desc) in descs.iter().enumerate() {
        vmm.control.set_desc(&vmm.mem, HEAD + index as u16, *desc);
    }
    vmm.control.offer(&vmm.mem, HEAD);
    vmm.control.kick();
    let (head, len) = wait_for_some("the chain", || vmm.control.used(&vmm.mem));
    assert_eq!(head, HEAD);
    len
}

fn a_malformed_chain_comes_back_empty() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    open_context(&mut vmm, 1);
    vmm.write(A, &header(GET_DISPLAY_INFO, 0));
    let response = desc(B, 24, WRITE, 0);
    let table = |vmm: &Vmm, descs: &[Desc]| {
        for (index, desc) in descs.iter().enumerate() {
            vmm.write(TABLE + index as u64 * 16, &desc.bytes());
        }
        desc(TABLE, descs.len() as u32 * 16, INDIRECT, 0)
    };
    let nested = table(&vmm, &[desc(TABLE, 16, INDIRECT, 0)]);
    let cases: Vec<(&str, Vec<Desc>)> = vec![
        ("a loop of one", vec![desc(A, 24, NEXT, HEAD)]),
        ("a loop of two", vec![desc(A, 24, NEXT, HEAD + 1), desc(B, 24, WRITE | NEXT, HEAD + 1)]),
        ("next beyond the table", vec![desc(A, 24, NEXT, QUEUE)]),
        ("a table in a table", vec![nested]),
        ("an empty table", vec![desc(TABLE, 0, INDIRECT, 0)]),
        ("a table of half a descriptor", vec![desc(TABLE, 24, INDIRECT, 0)]),
        ("a table outside memory", vec![desc(LOW_SIZE, 32, INDIRECT, 0)]),
        ("a table that ends outside memory", vec![desc(LOW_SIZE - 16, 64, INDIRECT, 0)]),
        ("a buffer of length 0", vec![desc(A, 0, NEXT, HEAD + 1), response]),
        ("write-only, no command", vec![desc(A, 24, WRITE | NEXT, HEAD + 1), response]),
        ("a command of 8 bytes", vec![desc(A, 8, NEXT, HEAD + 1), response]),
        ("no place for a response", vec![desc(A, 24, 0, 0)]),
        ("a read-only response", vec![desc(A, 24, NEXT, HEAD + 1), desc(B, 24, 0, 0)]),
        ("the response first", vec![desc(B, 24, WRITE | NEXT, HEAD + 1), desc(A, 24, 0, 0)]),
        ("a command beyond memory", vec![desc(LOW_SIZE, 24, NEXT, HEAD + 1), response]),
        ("a command over the end of memory", vec![desc(LOW_SIZE - 8, 24, NEXT, HEAD + 1), response]),
        ("a command at the end of all addresses", vec![desc(u64::MAX - 8, 24, NEXT, HEAD + 1), response]),
        ("a response beyond memory", vec![desc(A, 24, NEXT, HEAD + 1), desc(LOW_SIZE, 24, WRITE, 0)]),
        ("a response of 1 byte", vec![desc(A, 24, NEXT, HEAD + 1), desc(B, 1, WRITE, 0)]),
        ("4 GiB", vec![desc(A, u32::MAX, NEXT, HEAD + 1), response]),
    ];
    for (what, descs) in cases {
        if what == "a table in a table" {
            table(&vmm, &[desc(TABLE, 16, INDIRECT, 0)]);
        }
        assert_eq!(offer(&mut vmm, &descs), 0, "{what}");
        assert_eq!(kind(&vmm.command(&header(GET_DISPLAY_INFO, 0))), UNSPEC, "{what}");
    }
    // A table whose last descriptor goes on.
    let open = table(&vmm, &[desc(A, 24, NEXT, 1), desc(B, 24, WRITE | NEXT, 2)]);
    assert_eq!(offer(&mut vmm, &[open]), 0);
    // A head outside the table cannot be given back; the queue goes on.
    vmm.control.offer(&vmm.mem, QUEUE + 7);
    vmm.control.kick();
    check_context(&mut vmm, 1);
}

fn short_responses() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    vmm.write(A, &simple(GET_CAPSET, 0, &[8, 1]));
    for (room, expected) in [(23, 0), (24, 24), (60, 60), (88, 88), (4096, 88)] {
        assert_eq!(offer(&mut vmm, &[desc(A, 32, NEXT, HEAD + 1), desc(B, room, WRITE, 0)]), expected);
    }
    // A response in pieces.
    vmm.write(B, &[0; 128]);
    let pieces = [
        desc(A, 32, NEXT, HEAD + 1),
        desc(B, 1, WRITE | NEXT, HEAD + 2),
        desc(B + 1, 30, WRITE | NEXT, HEAD + 3),
        desc(B + 31, 97, WRITE, 0),
    ];
    assert_eq!(offer(&mut vmm, &pieces), 88);
    assert_eq!(kind(&vmm.read(B, 88)), OK_CAPSET);
    assert_eq!(&vmm.read(B + 24, 4), b"VKFD");
}

fn chains_in_tables_and_in_pieces() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    let command = simple(GET_CAPSET, 0, &[8, 1]);
    vmm.write(A, &command);
    // One byte in each descriptor: longer than the queue.
    let mut at = TABLE;
    for index in 0..command.len() as u16 {
        vmm.write(at, &desc(A + u64::from(index), 1, NEXT, index + 1).bytes());
        at += 16;
    }
    for index in 0..512u16 {
        let number = command.len() as u16 + index;
        let next = if index == 511 { 0 } else { NEXT };
        vmm.write(at, &desc(B + u64::from(index), 1, WRITE | next, number + 1).bytes());
        at += 16;
    }
    let table = desc(TABLE, (at - TABLE) as u32, INDIRECT, 0);
    assert_eq!(offer(&mut vmm, &[table]), 88);
    assert_eq!(&vmm.read(B + 24, 4), b"VKFD");
}

fn a_ring_that_jumps_stands_still_until_it_is_set_up_again() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    open_context(&mut vmm, 1);
    vmm.control.publish(&vmm.mem, vmm.control.avail.wrapping_add(300));
    vmm.control.kick();
    // The main channel still answers, and the processor is not kept busy.
    assert_eq!(vmm.frontend.get_features().unwrap() & 1, 1);
    let busy = cpu_ticks(daemon.device());
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert!(cpu_ticks(daemon.device()) - busy < 10, "the device spins");
    let base = vmm.frontend.get_vring_base(0).unwrap();
    assert_eq!(base, u32::from(vmm.control.avail));
    vmm.start(Setup::default());
    open_context(&mut vmm, 1);
    check_context(&mut vmm, 1);
}

/// Clock ticks (10 ms) that a process has run.
fn cpu_ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    // proc(5): utime and stime are fields 14 and 15; the split begins with field 3.
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

fn the_cursor_queue_is_emptied() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    vmm.write(A, &header(0x300, 0));
    for head in 0..10 {
        vmm.cursor.set_desc(&vmm.mem, head, desc(A, 24, 0, 0));
        vmm.cursor.offer(&vmm.mem, head);
    }
    vmm.cursor.kick();
    for head in 0..10 {
        assert_eq!(wait_for_some("a cursor command", || vmm.cursor.used(&vmm.mem)), (head, 0));
    }
}

fn notifications_by_index() {
    let daemon = Daemon::start(&[]);
    let setup = Setup { features: GPU_FEATURES | INDIRECT_DESC | EVENT_IDX, ..Setup::default() };
    let mut vmm = Vmm::set_up(daemon.connect(), setup);
    open_context(&mut vmm, 1);
    for round in 0..1000u16 {
        // used_event, behind the available ring: tell me about the next one.
        let done = vmm.control.avail;
        let used_event = vmm.control.avail_ring() + 4 + u64::from(QUEUE) * 2;
        vmm.write(used_event, &done.to_le_bytes());
        let _ = vmm.control.call.read();
        let head = vmm.submit(&submit(1, 0, u64::from(round), &nop(1, 0)));
        wait_for_some("an interrupt", || vmm.control.call.read().ok());
        assert_eq!(vmm.next_response().0, head);
    }
}

/// xorshift64 (Marsaglia 2003): the same commands in each run.
struct Random(u64);

impl Random {
    fn next(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

fn random_commands_do_no_harm() {
    let daemon = Daemon::start(&["--max-contexts", "4", "--vram-limit", "1G"]);
    let mut vmm = Vmm::connect(&daemon);
    open_context(&mut vmm, 9);
    let files = open_files(daemon.device());
    let seed = std::env::var("TEST_SEED").ok().and_then(|seed| seed.parse().ok());
    let mut random = Random(seed.unwrap_or(0x6b66_6476_6872_7421));
    let kinds =
        [CTX_CREATE, CTX_DESTROY, CTX_ATTACH, SUBMIT_3D, CREATE_BLOB, RESOURCE_UNREF, MAP_BLOB, UNMAP_BLOB];
    // A changed bit may make others than those that are meant.
    let (mut contexts, mut resources) = (BTreeSet::new(), BTreeSet::new());
    for round in 0..4000u64 {
        // Few contexts and resources, so that commands meet; the one that must survive is not among them.
        let ctx = random.next(4) as u32;
        let resource = random.next(6) as u32;
        let page = [(SCRATCH + random.next(16) * 0x800, 0x1000)];
        let mut command = match kinds[random.next(kinds.len() as u64) as usize] {
            CTX_CREATE => ctx_create(ctx, 8),
            CREATE_BLOB if random.next(2) == 0 => {
                // As Linux makes them, to be attached then, and for a context.
                guest_blob(ctx * random.next(2) as u32, resource, 0x1000, &page)
            }
            CREATE_BLOB if random.next(2) == 0 => {
                // The stub's tokens can be guessed.
                let workers = daemon.workers();
                let worker = workers[random.next(workers.len() as u64) as usize];
                let token = u64::from(worker) << 32 | random.next(4) | ShareToken::BIT;
                create_blob(ctx, resource, 2, token, 0x1000, 0, &[])
            }
            CREATE_BLOB => host_blob(ctx, resource, random.next(5) as u32, 0x1000),
            MAP_BLOB => map_blob(resource, random.next(8) * 0x800),
            SUBMIT_3D => {
                let mut frame = frame(resource, random.next(4) * 0x200);
                let handle = Handle::new(stub::GOOD_BUFFER, 1);
                match random.next(4) {
                    0 => frame.push::<ShareMemory>(
                        &ShareMemoryRequest { handle, offset: 0, size: 0x1000 },
                        &[],
                        0,
                    ),
                    1 => frame.push::<FreeMemory>(&BufferRequest { handle }, &[], 0),
                    2 => {
                        let resource = ResourceId(random.next(6) as u32);
                        frame.push::<ImportMemory>(
                            &ImportMemoryRequest { resource, ..Default::default() },
                            &[],
                            0,
                        )
                    }
                    _ => frame.push::<Nop>(&Default::default(), &[], 0),
                }
                .unwrap();
                submit(ctx, random.next(4) as u8, round, &frame.finish())
            }
            other => simple(other, ctx, &[resource, 0]),
        };
        // In every fourth some bytes are wrong, or the end is missing.
        if round % 4 == 0 {
            let at = random.next(command.len() as u64) as usize;
            command[at] ^= 1 << random.next(8);
            command.truncate(1 + random.next(command.len() as u64 * 2) as usize);
        }
        // A change of the context's number would end up at the survivor.
        if command.get(16..20).is_some_and(|ctx| ctx == 9u32.to_le_bytes()) {
            continue;
        }
        let word =
            |at: usize| command.get(at..at + 4).map(|word| u32::from_le_bytes(word.try_into().unwrap()));
        contexts.extend(word(16));
        resources.extend(word(24));
        let head = vmm.submit(&command);
        assert_eq!(vmm.next_response().0, head, "{command:x?}");
    }
    check_context(&mut vmm, 9);
    assert!(daemon.workers().len() <= 4);
    // Nothing of it stays.
    for ctx in contexts {
        vmm.command(&header(CTX_DESTROY, ctx));
    }
    resources.remove(&answer_blob(9));
    for resource in resources {
        vmm.command(&simple(RESOURCE_UNREF, 0, &[resource, 0]));
    }
    check_context(&mut vmm, 9);
    assert_eq!(daemon.workers().len(), 1);
    assert!(vmm.maps.live.lock().unwrap().is_empty());
    wait_for("the files", || open_files(daemon.device()) <= files);
}
