//! A context with memory that its GPU reaches and a queue that it can ring.

use anyhow::{Context, Result, ensure};
use guest_thunk::client::Client;
use guest_thunk::transport::Blob;
use virtio_kfd_protocol::calls::*;
use virtio_kfd_protocol::{
    AllocMemoryRequest, BufferRequest, CreateQueueRequest, DoorbellPageRequest, GpuId, GuestVa, Handle,
    QueueId, QueueRequest, RingDoorbellsRequest,
};

use crate::neighbour::{USERPTR, VA, acquire};
use crate::raw::{View, client};

/// Bytes of a page.
pub const P: u64 = 4096;

/// Pages of the memory: ring, pointers, data, one that the GPU does not reach, and two of doorbells.
const RING: u64 = 0;
const POINTERS: u64 = 1;
pub const DATA: u64 = 2;
pub const FAR: u64 = 3;
const BELLS: u64 = 4;
const PAGES: u64 = 6;

/// `KFD_IOC_QUEUE_TYPE_SDMA`
const SDMA: u32 = 1;

/// The context. Fields are dropped in this order: the client before the memory that its queues are on.
pub struct Machine {
    pub client: Client,
    pub gpu: GpuId,
    pub view: View,
    /// Of the GPU's pages, in their order.
    pub buffers: Vec<Handle>,
    blob: Box<dyn Blob>,
}

impl Machine {
    /// `None` where the VM has no GPU.
    pub fn new() -> Result<Option<Machine>> {
        let client = client()?;
        let Some(gpu) = acquire(&client)? else { return Ok(None) };
        let blob = client.guest_memory(PAGES * P)?;
        let view = View::of(&*blob)?;
        view.fill(0);
        let mut machine = Machine { client, gpu, view, buffers: Vec::new(), blob };
        for page in [RING, POINTERS, DATA] {
            let request = AllocMemoryRequest {
                va: GuestVa(VA + page * P),
                size: P,
                gpu_id: gpu,
                flags: USERPTR,
                resource: machine.blob.resource(),
                resource_offset: page * P,
                ..Default::default()
            };
            let (made, _) = machine.client.call::<AllocMemory>(&request, &[], 0).context("AllocMemory")?;
            let handle = BufferRequest { handle: made.handle };
            let (mapped, _) = machine.client.call::<MapMemory>(&handle, &[gpu], 0).context("MapMemory")?;
            ensure!(mapped.n_success == 1, "MapMemory of page {page}: errno {}", mapped.errno);
            machine.buffers.push(made.handle);
        }
        let request =
            DoorbellPageRequest { gpu_id: gpu, resource: machine.blob.resource(), offset: BELLS * P };
        machine.client.call::<DoorbellPage>(&request, &[], 0).context("DoorbellPage")?;
        Ok(Some(machine))
    }

    /// A queue that the host takes, with a context save area there.
    pub fn queue(&self, area: u64) -> CreateQueueRequest {
        CreateQueueRequest {
            ring_va: GuestVa(VA + RING * P),
            write_pointer_va: GuestVa(VA + POINTERS * P),
            read_pointer_va: GuestVa(VA + POINTERS * P + 64),
            ring_size: P as u32,
            gpu_id: self.gpu,
            kind: SDMA,
            percentage: 100,
            priority: 7,
            context_save_va: GuestVa(area),
            ..Default::default()
        }
    }

    /// Makes a queue and gives it what is no packet that there is, so that it has an exception.
    pub fn fail(&self, area: u64) -> Result<QueueId> {
        self.start(area, &[0xff, 0])
    }

    /// Makes a queue and rings for packets.
    pub fn start(&self, area: u64, packets: &[u64]) -> Result<QueueId> {
        for pointer in [0, 64] {
            self.view.store(POINTERS * P + pointer, 0);
        }
        let (made, _) = self.client.call::<CreateQueue>(&self.queue(area), &[], 0).context("CreateQueue")?;
        for (at, word) in (RING * P..).step_by(8).zip(packets) {
            self.view.store(at, *word);
        }
        let end = 8 * packets.len() as u64;
        self.view.store(POINTERS * P, end);
        self.view.store(BELLS * P + u64::from(made.doorbell_offset), end);
        let ring = RingDoorbellsRequest { armed: 0, pad: 0 };
        self.client.call::<RingDoorbells>(&ring, &[], 0).context("RingDoorbells")?;
        Ok(made.queue)
    }

    pub fn destroy(&self, queue: QueueId) -> Result<()> {
        let request = QueueRequest { queue, pad: 0 };
        self.client.call::<DestroyQueue>(&request, &[], 0).context("DestroyQueue")?;
        Ok(())
    }
}
