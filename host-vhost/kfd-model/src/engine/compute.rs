//! What runs kernels: AQL and PM4 dispatches on the instruction set of [`kfd_isa`].
//!
//! A dispatch is cut into workgroups. The queue's own thread runs them, together with threads that all queues of the
//! process share ([`pool`]): these stand for the compute units. A workgroup runs for a turn of about 2 ms before another
//! one may, so that workgroups can wait for one another as they can on a GPU that has room for all of them, and so that
//! neither a kernel nor a queue starves the others. Within a turn it runs in slices of some thousand instructions; between
//! them it notices that its queue is paused, destroyed or evicted, and others can change the page table ([`pages`]).
//!
//! A kernel whose queue is paused is kept as it is, and goes on when the same packet is dispatched again: the model's way
//! of saving the state of waves.

mod job;
mod launch;
mod object;
mod pages;
mod pool;
mod unit;
mod units;

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use kfd_isa::gws::Gws;

pub use job::Machine;
use job::{Job, Outcome, Turn, Worker};
use object::Prepared;
pub use pool::Pool;
pub use units::Units;

use super::dispatch::{Dispatch, Dispatched, Dispatcher};
use super::{Context, Failure};

/// How long the queue's thread waits for others to finish before it looks whether it shall stop.
const LOOK: Duration = Duration::from_millis(1);

/// The environment variable that asks for a line on standard error for each dispatch.
const STATISTICS: &str = "VIRTIO_KFD_MODEL_STATS";

fn wants_statistics() -> bool {
    static WANTED: OnceLock<bool> = OnceLock::new();
    *WANTED.get_or_init(|| std::env::var_os(STATISTICS).is_some_and(|value| value == "1"))
}

/// The dispatcher of one queue.
pub struct Compute {
    machine: Machine,
    pool: Arc<Pool>,
    /// Global wave sync: KFD gives it to one queue of a process at a time, and takes nothing of what it holds away.
    gws: Arc<Mutex<Gws>>,
    own: Mutex<Own>,
}

/// What only the queue's thread uses.
#[derive(Default)]
struct Own {
    worker: Worker,
    /// The kernel that was broken off, and what dispatched it.
    broken_off: Option<(Identity, Arc<Job>)>,
}

/// What tells whether a dispatch is the one that was broken off.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Identity {
    Packet(u64),
    Registers { program: u64, dimensions: [u32; 3] },
}

impl Identity {
    fn of(dispatch: &Dispatch<'_>) -> Self {
        match dispatch {
            Dispatch::Aql(aql) => Self::Packet(aql.index),
            Dispatch::Registers(registers) => {
                Self::Registers { program: registers.program(), dimensions: registers.dimensions }
            }
        }
    }
}

impl core::fmt::Debug for Compute {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        formatter.debug_struct("Compute").field("gpu_id", &self.machine.gpu_id).finish_non_exhaustive()
    }
}

impl Compute {
    /// For one queue of a process that has this pool.
    pub fn new(machine: Machine, pool: Arc<Pool>) -> Self {
        Self { machine, pool, gws: Arc::default(), own: Mutex::default() }
    }

    fn job(
        &self,
        own: &mut Own,
        dispatch: &Dispatch<'_>,
        context: &Context<'_>,
    ) -> Result<Option<Arc<Job>>, Failure> {
        let identity = Identity::of(dispatch);
        if let Some((broken_off, job)) = own.broken_off.take()
            && broken_off == identity
        {
            job.set_stop(false);
            return Ok(Some(job));
        }
        let prepared = match dispatch {
            Dispatch::Aql(aql) => object::from_packet(aql, context.memory)?,
            Dispatch::Registers(registers) => object::from_registers(registers)?,
        };
        Ok(match prepared {
            Prepared::Ready(launch) => {
                let mut job = Job::new(launch, self.machine.clone(), self.pool.waves(), self.gws.clone());
                if wants_statistics() {
                    job.measure_cpu_time();
                }
                Some(Arc::new(job))
            }
            Prepared::InsufficientScratch => None,
        })
    }
}

impl Dispatcher for Compute {
    fn dispatch(&self, dispatch: &Dispatch<'_>, context: &Context<'_>) -> Result<Dispatched, Failure> {
        let mut own = self.own.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(job) = self.job(&mut own, dispatch, context)? else {
            return Ok(Dispatched::InsufficientScratch { wave32: false });
        };
        // Before others can begin with it.
        let since = wants_statistics().then(Instant::now);
        // This thread is one that works on it.
        let others = job.width().saturating_sub(1);
        if others > 0 {
            self.pool.offer(&job, others);
        }
        let stopping = || context.stopping();
        let end = loop {
            match job.outcome() {
                Outcome::Done => break Ok(Dispatched::Done),
                Outcome::Failed(failure) => break Err(failure),
                Outcome::Unfinished => {}
            }
            // A turn may have seen a pause that is over by now.
            if stopping() || job.is_stopped() {
                job.set_stop(true);
                job.wait_idle();
                own.broken_off = Some((Identity::of(dispatch), job.clone()));
                break Ok(Dispatched::Stopped);
            }
            if job.turn(&mut own.worker, &stopping) == Turn::Nothing {
                job.wait(LOOK);
            }
        };
        self.pool.withdraw(&job);
        if let Some(since) = since {
            let (count, time, cpu) =
                (job.instructions(), since.elapsed().as_micros(), job.cpu_time().as_micros());
            eprintln!("kfd-model: dispatch: {count} wave-instructions in {time} us, {cpu} us of CPU time");
        }
        end
    }
}

#[cfg(test)]
mod tests;
