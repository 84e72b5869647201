//! Pages of HDP flush registers (`HSA_HEAPTYPE_MMIO_REMAP`), for those who ask for them (`VIRTIO_KFD_HDP=trap`).
//!
//! Natively a program stores to a register of a GPU, and by its next instruction all that it wrote to VRAM has got there. The page
//! of these registers belongs to the process on the host that owns the KFD process. So the program gets a page that it can
//! read, and whose stores trap ([`trap`]); a thread of this library, the server, has the host store to the register. GPUs have
//! the real page at the same address, as natively.

#[cfg(target_arch = "x86_64")]
mod store;
#[cfg(target_arch = "x86_64")]
mod trap;
#[cfg(not(target_arch = "x86_64"))]
#[path = "hdp/no_trap.rs"]
mod trap;

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Once, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use nix::sys::signal::{SigSet, SigmaskHow};
use virtio_kfd_protocol::calls::FlushHdp;
use virtio_kfd_protocol::{FlushHdpRequest, GpuId, Handle, Status};

use self::trap::Watched;
use super::Thunk;
use super::lock::lock;
use super::memory::Memory;
use super::memory::block::Block;
use super::refusal::{Level, Outcome, Refusal, say, tell};
use super::topology::{Gpu, Snapshot};
use crate::client::Client;

/// Stack of the server in bytes.
const STACK_BYTES: usize = 128 << 10;
/// Between two attempts of a flush that could not be sent.
const AGAIN: Duration = Duration::from_millis(1);

/// A GPU's page.
struct Page {
    // Dropped first: nobody looks for stores there any more when its addresses go.
    watched: Watched,
    block: Block,
    handle: Handle,
    gpu_id: GpuId,
    /// A flush that the host refused has been told of.
    told: Once,
}

/// The pages of a connection. They stay until the close.
#[derive(Default)]
pub struct Hdp {
    pages: Mutex<Vec<Page>>,
    server: Mutex<Option<Server>>,
}

impl Hdp {
    /// The address of a GPU's page, which is made now if there is none. None where it cannot be had.
    pub fn page(&self, thunk: &Arc<Thunk>, snapshot: &Snapshot, gpu: &Gpu) -> Option<u64> {
        let mut pages = lock(&self.pages);
        if let Some(page) = pages.iter().find(|page| page.gpu_id == gpu.gpu_id) {
            return Some(page.block.start());
        }
        match self.make(thunk, snapshot, gpu) {
            Ok(page) => {
                let start = page.block.start();
                pages.push(page);
                Some(start)
            }
            Err(why) => {
                say(Level::Warning, || format!("no HDP flush registers of GPU {:#x}: {why}", gpu.gpu_id.0));
                None
            }
        }
    }

    fn make(&self, thunk: &Arc<Thunk>, snapshot: &Snapshot, gpu: &Gpu) -> Outcome<Page> {
        let host = thunk.host(snapshot);
        let failed = |error: io::Error| Refusal::error(error.to_string());
        let mut server = lock(&self.server);
        if server.is_none() {
            *server = Some(Server::start(thunk).map_err(failed)?);
        }
        let (block, handle) = thunk.memory.registers_block(host, gpu)?;
        match Watched::new(block.start()) {
            Ok(watched) => Ok(Page { watched, block, handle, gpu_id: gpu.gpu_id, told: Once::new() }),
            Err(error) => {
                thunk.memory.free_block(host.client, &block)?;
                Err(failed(error))
            }
        }
    }

    /// Has the host store to the registers that the program has stored to.
    fn serve(&self, client: &Client, over: &AtomicBool) {
        for page in &*lock(&self.pages) {
            page.watched.serve(|register| flush(client, page, register, over));
        }
    }

    /// Gives them back. A store that is under way ends.
    pub fn release_all(&self, memory: &Memory, client: &Client) {
        if let Some(server) = lock(&self.server).take() {
            server.end();
        }
        for Page { watched, block, .. } in lock(&self.pages).drain(..) {
            drop(watched);
            // Else the connection's end frees it.
            let _ = memory.free_block(client, &block);
        }
    }
}

/// A flush, until it is done or cannot be.
fn flush(client: &Client, page: &Page, register: u32, over: &AtomicBool) {
    let request = FlushHdpRequest { handle: page.handle, register, pad: 0 };
    while !over.load(Ordering::SeqCst) {
        match client.call::<FlushHdp>(&request, &[], 0) {
            Ok(_) => return,
            // That has been told; natively a store to a GPU that is gone has no effect either.
            Err(_) if client.is_lost() => return,
            Err(error) => match error.status() {
                // Short of something: the store waits.
                None | Some((Status::LIMIT, _)) => thread::sleep(AGAIN),
                // The application has freed the page.
                Some(_) => {
                    let gpu = page.gpu_id.0;
                    return page.told.call_once(|| tell(&format!("GPU {gpu:#x} was not flushed: {error}")));
                }
            },
        }
    }
}

/// The thread that talks to the host for those who wait in the handler.
struct Server {
    thread: Option<JoinHandle<()>>,
    over: Arc<AtomicBool>,
}

impl Server {
    fn start(thunk: &Arc<Thunk>) -> io::Result<Server> {
        let over = Arc::new(AtomicBool::new(false));
        let (weak, end) = (Arc::downgrade(thunk), Arc::clone(&over));
        let builder = thread::Builder::new().name("hdp".into()).stack_size(STACK_BYTES);
        // The program's signals are handled by its own threads. The new one inherits this.
        let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
        let thread = builder.spawn(move || serve(&weak, &end));
        before.thread_set_mask()?;
        Ok(Server { thread: Some(thread?), over })
    }

    /// Ends it and waits for that.
    fn end(mut self) {
        self.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }

    fn stop(&self) {
        self.over.store(true, Ordering::SeqCst);
        trap::ring();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Not joined: it may be the server itself that drops the connection.
        self.stop();
    }
}

fn serve(thunk: &Weak<Thunk>, over: &AtomicBool) {
    while !over.load(Ordering::SeqCst) {
        let heard = trap::bell();
        match thunk.upgrade() {
            Some(thunk) => thunk.hdp.serve(&thunk.client, over),
            None => return,
        }
        if !over.load(Ordering::SeqCst) {
            trap::await_bell(heard);
        }
    }
}
