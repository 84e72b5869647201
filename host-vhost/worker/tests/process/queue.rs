//! Queues and doorbells, over the model's packet processors.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use kfd_ipc::ledger::{Counted, Ledger};
use kfd_ipc::worker::{CuMask, Settings, ToWorker};
use virtio_kfd_protocol::calls::*;
use virtio_kfd_protocol::*;

use crate::support::memory::{DOORBELL, USERPTR, WRITABLE};
use crate::support::*;

/// `KFD_IOC_QUEUE_TYPE_SDMA`
const SDMA: u32 = 1;

pub const P: u64 = 4096;
pub const VA: u64 = 0x12_0000_0000;
const EINVAL: u32 = 22;
const ENOTSUPP: u32 = 524;
/// The blob of the guest's memory, and its pages: ring, pointers, data, and two of doorbells.
pub const BLOB: u32 = 5;
pub const RING: u64 = 0;
pub const POINTERS: u64 = 1;
pub const DATA: u64 = 2;
pub const BELLS: u64 = 4;
/// Enough for a loaded machine.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A context with guest memory that a GPU reaches page by page, at the same distance from [`VA`] as in the file.
pub struct Guest {
    pub worker: Worker,
    pub gpu_id: GpuId,
    pub ram: File,
    pub buffers: Vec<Handle>,
}

impl Guest {
    pub fn new(profile: &str, settings: Settings) -> Self {
        Self::over(Worker::greeted(profile, settings))
    }

    fn over(mut worker: Worker) -> Self {
        let gpu_id = worker.acquire();
        let ram = tempfile::tempfile().unwrap();
        ram.set_len(16 * P).unwrap();
        worker.guest_memory(&ram, 16, BLOB, &[0, 1, 2, 3, 4, 5, 6, 7]);
        let mut guest = Guest { worker, gpu_id, ram, buffers: Vec::new() };
        for page in [RING, POINTERS, DATA] {
            let request = AllocMemoryRequest {
                va: GuestVa(VA + page * P),
                size: P,
                gpu_id,
                flags: USERPTR | WRITABLE,
                resource: ResourceId(BLOB),
                resource_offset: page * P,
                ..Default::default()
            };
            let handle = guest.worker.call::<AllocMemory>(&request, &[]).unwrap().0.handle;
            let (mapped, _) = guest.worker.call::<MapMemory>(&BufferRequest { handle }, &[gpu_id]).unwrap();
            assert_eq!((mapped.n_success, mapped.errno), (1, 0));
            guest.buffers.push(handle);
        }
        guest
    }

    pub fn doorbell_page(&self) -> DoorbellPageRequest {
        DoorbellPageRequest { gpu_id: self.gpu_id, resource: ResourceId(BLOB), offset: BELLS * P }
    }

    pub fn queue(&self) -> CreateQueueRequest {
        CreateQueueRequest {
            ring_va: GuestVa(VA + RING * P),
            write_pointer_va: GuestVa(VA + POINTERS * P),
            read_pointer_va: GuestVa(VA + POINTERS * P + 64),
            ring_size: 4096,
            gpu_id: self.gpu_id,
            kind: SDMA,
            percentage: 100,
            priority: 7,
            ..Default::default()
        }
    }

    /// A new queue, and where in the file its doorbell is.
    fn create(&mut self) -> (QueueId, u64) {
        let (answer, _) = self.worker.call::<CreateQueue>(&self.queue(), &[]).unwrap();
        assert_eq!(answer.doorbell_offset % 8, 0);
        (answer.queue, BELLS * P + u64::from(answer.doorbell_offset))
    }

    pub fn destroy(&mut self, queue: QueueId) -> (Status, u32) {
        self.worker.failure::<DestroyQueue>(&QueueRequest { queue, pad: 0 }, &[])
    }

    pub fn word(&self, offset: u64) -> u64 {
        let mut bytes = [0; 8];
        self.ram.read_exact_at(&mut bytes, offset).unwrap();
        u64::from_le_bytes(bytes)
    }

    pub fn set_word(&self, offset: u64, value: u64) {
        self.ram.write_all_at(&value.to_le_bytes(), offset).unwrap();
    }

    /// Puts an SDMA fence packet (SDMA_PKT_FENCE, vega10_sdma_pkt_open.h) into the ring that writes `value` to the data page.
    fn fence(&self, at: u64, value: u32) {
        let va = VA + DATA * P;
        let packet = [5, va as u32, (va >> 32) as u32, value];
        let bytes: Vec<u8> = packet.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.ram.write_all_at(&bytes, RING * P + at % P).unwrap();
        self.set_word(POINTERS * P, at + 16);
    }

    fn await_data(&self, value: u32) {
        let begin = Instant::now();
        while self.word(DATA * P) as u32 != value {
            assert!(begin.elapsed() < PATIENCE, "{value} has not come, {:#x} is there", self.word(DATA * P));
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}

fn ring(armed: u32) -> RingDoorbellsRequest {
    RingDoorbellsRequest { armed, pad: 0 }
}

#[test]
fn stores_of_the_guest_reach_the_gpu_whether_it_announces_them_or_not() {
    let mut guest = Guest::new("gfx906", settings());
    guest.worker.call::<DoorbellPage>(&guest.doorbell_page(), &[]).unwrap();
    let (queue, doorbell) = guest.create();
    assert_eq!(guest.word(doorbell), u64::MAX, "idle");
    let mut at = 0;
    for round in 0..600u32 {
        guest.fence(at, round + 1);
        at += 16;
        if round % 50 == 49 {
            // The doorbells are still, the guest arms its trap, the store traps.
            let request = WaitDoorbellsRequest { timeout_ms: 30_000, pad: 0 };
            let mut wait = frame(VERSION);
            wait.push::<WaitDoorbells>(&request, &[], 0).unwrap();
            guest.worker.frame(1, wait);
            let (answer, _) = guest.worker.answer(1).decode::<WaitDoorbells>(0).unwrap();
            assert_eq!(answer.still, 1);
            guest.worker.call::<RingDoorbells>(&ring(1), &[]).unwrap();
            guest.worker.call::<RingDoorbells>(&ring(0), &[]).unwrap();
        }
        guest.set_word(doorbell, at);
        guest.await_data(round + 1);
    }
    assert_eq!(guest.destroy(queue), (Status::OK, 0));
    assert_eq!(guest.destroy(queue), (Status::ERRNO, EINVAL));
}

/// A packet of one queue rings another one, as on bare metal: no store of the guest's is passed on.
#[test]
fn a_gpu_rings_doorbells_itself() {
    const BELLS_VA: u64 = VA + 0x10_0000;
    let mut guest = Guest::new("gfx906", settings());
    let gpu_id = guest.gpu_id;
    guest.worker.call::<DoorbellPage>(&guest.doorbell_page(), &[]).unwrap();
    let bells = AllocMemoryRequest {
        va: GuestVa(BELLS_VA),
        size: DOORBELL_SLICE_BYTES,
        gpu_id,
        flags: DOORBELL | WRITABLE,
        ..Default::default()
    };
    let (bells, _) = guest.worker.call::<AllocMemory>(&bells, &[]).unwrap();
    assert_eq!(bells.mappable, 0, "a CPU rings elsewhere");
    let bells = BufferRequest { handle: bells.handle };
    let (mapped, _) = guest.worker.call::<MapMemory>(&bells, &[gpu_id]).unwrap();
    assert_eq!((mapped.n_success, mapped.errno), (1, 0));
    let share = ShareMemoryRequest { handle: bells.handle, offset: 0, size: DOORBELL_SLICE_BYTES };
    assert_eq!(guest.worker.failure::<ShareMemory>(&share, &[]), (Status::NOT_SUPPORTED, 0));

    // The ring of the first queue has a packet that nobody rings for; the second queue's is in the upper half of its page.
    let (first, doorbell) = guest.create();
    guest.fence(0, 99);
    guest.set_word(POINTERS * P, 0);
    let pointers = VA + POINTERS * P + 128;
    let ring = GuestVa(VA + RING * P + 2048);
    let (second, _) = guest
        .worker
        .call::<CreateQueue>(
            &CreateQueueRequest {
                ring_va: ring,
                ring_size: 2048,
                write_pointer_va: GuestVa(pointers),
                read_pointer_va: GuestVa(pointers + 64),
                ..guest.queue()
            },
            &[],
        )
        .unwrap();
    // SDMA_PKT_WRITE_UNTILED (vega10_sdma_pkt_open.h): two words, the first queue's write pointer.
    let va = BELLS_VA + (doorbell - BELLS * P);
    let packet = [2, va as u32, (va >> 32) as u32, 1, 16, 0];
    let bytes: Vec<u8> = packet.iter().flat_map(|word: &u32| word.to_le_bytes()).collect();
    guest.ram.write_all_at(&bytes, RING * P + 2048).unwrap();
    guest.set_word(POINTERS * P + 128, 24);
    guest.set_word(BELLS * P + u64::from(second.doorbell_offset), 24);
    guest.await_data(99);
    assert_eq!(guest.word(doorbell), u64::MAX, "the guest's own memory is as it was");
    for queue in [first, second.queue] {
        assert_eq!(guest.destroy(queue), (Status::OK, 0));
    }
    // They are not memory that goes with a blob, and not counted.
    guest.worker.call::<UnmapMemory>(&bells, &[gpu_id]).unwrap();
    guest.worker.call::<FreeMemory>(&bells, &[]).unwrap();
}

/// What a queue has left where its doorbell was rings no other one.
#[test]
fn a_new_queue_begins_with_an_idle_doorbell() {
    let mut guest = Guest::new("gfx906", settings());
    // The page may come before the queue or after it.
    let (queue, doorbell) = guest.create();
    guest.worker.call::<DoorbellPage>(&guest.doorbell_page(), &[]).unwrap();
    assert_eq!(guest.word(doorbell), u64::MAX);
    guest.fence(0, 1);
    guest.set_word(doorbell, 16);
    guest.await_data(1);
    assert_eq!(guest.destroy(queue), (Status::OK, 0));
    guest.set_word(doorbell, 32);
    guest.set_word(POINTERS * P, 0);
    guest.set_word(POINTERS * P + 64, 0);
    guest.set_word(DATA * P, 0);
    let (queue, again) = guest.create();
    assert_eq!((again, guest.word(again)), (doorbell, u64::MAX), "the number is used again");
    guest.fence(0, 7);
    guest.set_word(doorbell, 16);
    guest.await_data(7);
    assert_eq!(guest.destroy(queue), (Status::OK, 0));
}

#[test]
fn queues_are_limited() {
    let mut guest = Guest::new("gfx906", Settings { max_queues: 2, ..settings() });
    let queue = guest.queue();
    let (first, _) = guest.create();
    let (second, _) = guest.create();
    assert_eq!(guest.worker.failure::<CreateQueue>(&queue, &[]), (Status::LIMIT, 0));
    assert_eq!(guest.destroy(first), (Status::OK, 0));
    let (third, _) = guest.create();
    for queue in [second, third] {
        assert_eq!(guest.destroy(queue), (Status::OK, 0));
    }
    // What the kernel refuses uses nothing up (set_queue_properties_from_user; kfd_ioctl_create_queue).
    let refused = [
        (CreateQueueRequest { kind: 5, ..queue }, (Status::ERRNO, ENOTSUPP)),
        (CreateQueueRequest { percentage: 101, ..queue }, (Status::ERRNO, EINVAL)),
        (CreateQueueRequest { priority: 16, ..queue }, (Status::ERRNO, EINVAL)),
        (CreateQueueRequest { ring_size: 3000, ..queue }, (Status::ERRNO, EINVAL)),
        (CreateQueueRequest { gpu_id: GpuId(1), ..queue }, (Status::NO_SUCH_GPU, 0)),
    ];
    for _ in 0..3 {
        for (request, status) in refused {
            assert_eq!(guest.worker.failure::<CreateQueue>(&request, &[]), status, "{request:?}");
        }
    }
    guest.create();
    guest.create();
}

#[test]
fn all_queues_of_a_vm_are_limited() {
    let ledger = Ledger::create(3).unwrap();
    let file = File::from(ledger.file().try_clone_to_owned().unwrap());
    let mut guests = [0, 1].map(|ledger_slot| {
        let limits = Settings { ledger_slot, vm_max_queues: Some(2), ..settings() };
        let mut worker = Worker::spawn(Some("gfx906"));
        worker.start_with(limits, Some(&file));
        worker.hello().unwrap();
        Guest::over(worker)
    });
    let (first, _) = guests[0].create();
    guests[1].create();
    let over = guests[1].queue();
    assert_eq!(guests[1].worker.failure::<CreateQueue>(&over, &[]), (Status::LIMIT, 0));
    assert_eq!((ledger.of(0, Counted::Queues), ledger.sum(Counted::Queues)), (1, 2));
    assert_eq!(guests[0].destroy(first), (Status::OK, 0));
    guests[1].create();
    assert_eq!(ledger.of(1, Counted::Queues), 2);
}

/// The guest gives the memory up under a live queue: the queue is gone, and nobody looks at the doorbells any more.
#[test]
fn memory_under_a_live_queue_goes_back_to_the_guest() {
    for with_region in [false, true] {
        let mut guest = Guest::new("gfx906", settings());
        guest.worker.call::<DoorbellPage>(&guest.doorbell_page(), &[]).unwrap();
        let (queue, doorbell) = guest.create();
        guest.fence(0, 1);
        guest.set_word(doorbell, 16);
        guest.await_data(1);
        let ticket = guest.worker.ticket();
        let message = match with_region {
            false => ToWorker::DetachBlob { resource: BLOB, ticket },
            true => ToWorker::RemoveRegion { region: BLOB, ticket },
        };
        guest.worker.send(&message, None);
        assert_eq!(guest.worker.other().0, Other::Done(ticket));
        // A touch of it would be a SIGBUS.
        guest.ram.set_len(0).unwrap();
        guest.worker.call::<RingDoorbells>(&ring(0), &[]).unwrap();
        assert_eq!(guest.destroy(queue), (Status::ERRNO, EINVAL), "it is gone");
        for handle in guest.buffers.clone() {
            let freed = guest.worker.failure::<FreeMemory>(&BufferRequest { handle }, &[]);
            assert_eq!(freed, (Status::BAD_HANDLE, 0));
        }
        let (status, log) = guest.worker.end();
        assert_eq!(status, 0, "{log}");
    }
}

#[test]
fn doorbell_pages_are_two_pages_of_guest_memory() {
    let mut guest = Guest::new("gfx906", settings());
    let page = guest.doorbell_page();
    let wrong = [
        (DoorbellPageRequest { offset: 8, ..page }, Status::INVALID),
        (DoorbellPageRequest { offset: 7 * P, ..page }, Status::BAD_RESOURCE),
        (DoorbellPageRequest { offset: !0xfff, ..page }, Status::BAD_RESOURCE),
        (DoorbellPageRequest { resource: ResourceId(6), ..page }, Status::BAD_RESOURCE),
        (DoorbellPageRequest { gpu_id: GpuId(1), ..page }, Status::NO_SUCH_GPU),
    ];
    for (request, status) in wrong {
        assert_eq!(guest.worker.failure::<DoorbellPage>(&request, &[]), (status, 0), "{request:?}");
    }
    guest.worker.call::<DoorbellPage>(&page, &[]).unwrap();
    assert_eq!(guest.worker.failure::<DoorbellPage>(&page, &[]), (Status::INVALID, 0), "there is one");
    assert_eq!(guest.worker.failure::<RingDoorbells>(&ring(2), &[]), (Status::INVALID, 0));
    let still = WaitDoorbellsRequest { timeout_ms: 1, pad: 0 };
    assert_eq!(guest.worker.failure::<WaitDoorbells>(&still, &[]), (Status::WRONG_RING, 0));
}

/// The operator's mask is set on new queues, which shows where the kernel refuses it, and bounds the guest's.
#[test]
fn compute_units_are_the_operators() {
    let masks = vec![CuMask { gpu: None, words: vec![0xff] }];
    let mut guest = Guest::new("gfx906", Settings { cu_masks: masks, ..settings() });
    let (queue, _) = guest.create();
    let request = QueueRequest { queue, pad: 0 };
    guest.worker.call::<SetCuMask>(&request, &[0xff0f, 1]).unwrap();
    assert_eq!(guest.worker.failure::<SetCuMask>(&request, &[0xff00, 1]), (Status::INVALID, 0));
    assert_eq!(guest.worker.failure::<SetCuMask>(&request, &[]), (Status::ERRNO, EINVAL));
}
