//! A kernel while it runs: its workgroups, those that wait for their next turn, and how it ended.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kfd_isa::Target;
use kfd_isa::bus::BusFault;
use kfd_isa::group::{Group, Halt, Progress};
use kfd_isa::gws::Gws;
use kfd_isa::start::Start;
use kfd_isa::stop::Stop;

use super::launch::{Launch, Workgroup, Workgroups};
use super::unit::UnitMemory;
use super::units::Units;
use crate::engine::view::PageTable;
use crate::engine::{DispatchFailure, Failure, World};
use crate::space::Fault;

/// Instructions of a slice: short enough for a change of the page table to wait, some ten to hundred microseconds.
const SLICE: u32 = 8192;

/// How long a workgroup runs before another one gets its compute unit.
const TURN: Duration = Duration::from_millis(2);

/// Waves that all kernels of a process have begun and not ended, beyond which none is begun while others wait for their
/// turn: what they need of memory, 64 KiB each, is bounded.
pub const MAX_WAVES: u32 = 1024;

/// Numbers of kernels; 0 is none.
static NUMBERS: AtomicU64 = AtomicU64::new(1);

/// What a kernel runs on.
#[derive(Clone)]
pub struct Machine {
    /// KFD's id of the GPU.
    pub gpu_id: u32,
    /// Its page table.
    pub table: Arc<dyn PageTable>,
    /// The rest of the model.
    pub world: Arc<dyn World>,
    /// Instruction set.
    pub target: Target,
    /// Compute units that the queue may use.
    pub units: Arc<Units>,
}

/// A workgroup that was begun.
struct Resident {
    group: Box<Group>,
    waves: u32,
    /// Places in the queue's scratch memory.
    places: Vec<u32>,
}

/// Why no workgroup begins and none goes on any more.
enum Ending {
    Failed(Failure),
}

struct State {
    workgroups: Workgroups,
    /// Those that wait for their next turn.
    parked: VecDeque<Resident>,
    /// Those that run now.
    running: u32,
    /// Both.
    resident: u32,
    /// Places in scratch memory that no wave has.
    free_places: Vec<u32>,
    ending: Option<Ending>,
}

/// A kernel while it runs.
pub struct Job {
    launch: Launch,
    machine: Machine,
    /// The compute units that its workgroups take in turn.
    units: Arc<[u32]>,
    /// Workgroups that were begun.
    begun: AtomicUsize,
    /// Workgroups that the GPU has room for at a time.
    most_resident: u32,
    /// It shall stop; what runs is kept for later.
    stop: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
    /// Waves of all kernels of the process.
    waves: Arc<AtomicU32>,
    /// Global wave sync of its queue.
    gws: Arc<Mutex<Gws>>,
    /// Instructions of the workgroups that ended.
    instructions: AtomicU64,
    /// Nanoseconds of CPU time that threads spent on it, if that is measured.
    cpu_time: Option<AtomicU64>,
    /// No other kernel of the process has it.
    number: u64,
}

/// What a thread did with a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// It ran a workgroup.
    Ran,
    /// There is none to run now.
    Nothing,
}

/// What became of a job.
pub enum Outcome {
    /// All of it ran.
    Done,
    /// It failed.
    Failed(Failure),
    /// There is more to run.
    Unfinished,
}

/// What a thread keeps from workgroup to workgroup.
#[derive(Default)]
pub struct Worker {
    memory: UnitMemory,
    spare: Option<Box<Group>>,
}

/// CPU time of this thread in nanoseconds.
fn thread_time() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    // Neither is negative.
    (time.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(time.tv_nsec as u64)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Job {
    /// A kernel of which nothing has run.
    pub fn new(launch: Launch, machine: Machine, waves: Arc<AtomicU32>, gws: Arc<Mutex<Gws>>) -> Self {
        let units = machine.units.used();
        let count = u32::try_from(units.len()).unwrap_or(u32::MAX);
        let most_resident = launch.groups_of_a_unit().saturating_mul(count.max(1));
        let state = State {
            workgroups: Workgroups::new(&launch),
            parked: VecDeque::new(),
            running: 0,
            resident: 0,
            // The lowest first.
            free_places: (0..launch.scratch.waves).rev().collect(),
            ending: None,
        };
        Self {
            launch,
            machine,
            units,
            begun: AtomicUsize::new(0),
            most_resident,
            stop: AtomicBool::new(false),
            state: Mutex::new(state),
            changed: Condvar::new(),
            waves,
            gws,
            instructions: AtomicU64::new(0),
            cpu_time: None,
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
        }
    }

    /// Instructions that waves ran in it so far, but for workgroups that run yet.
    pub fn instructions(&self) -> u64 {
        self.instructions.load(Ordering::Relaxed)
    }

    /// From now on the CPU time of its turns is measured.
    pub fn measure_cpu_time(&mut self) {
        self.cpu_time = Some(AtomicU64::new(0));
    }

    /// CPU time that threads spent on it so far; zero if it is not measured.
    pub fn cpu_time(&self) -> Duration {
        let nanoseconds = self.cpu_time.as_ref().map(|spent| spent.load(Ordering::Relaxed));
        Duration::from_nanos(nanoseconds.unwrap_or(0))
    }

    /// Workgroups that can be worked on at a time, as far as that matters.
    pub fn width(&self) -> usize {
        let state = lock(&self.state);
        state.workgroups.left().saturating_add(state.parked.len())
    }

    /// Whether it is to be broken off.
    pub fn set_stop(&self, stop: bool) {
        self.stop.store(stop, Ordering::Relaxed);
    }

    /// It is to be broken off, or was.
    pub fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// How it stands. Nothing of a job that is done or failed runs any more.
    pub fn outcome(&self) -> Outcome {
        let mut state = lock(&self.state);
        if state.running > 0 {
            return Outcome::Unfinished;
        }
        match state.ending.take() {
            Some(Ending::Failed(failure)) => {
                // No thread that still knows of it begins anything.
                self.set_stop(true);
                Outcome::Failed(failure)
            }
            None if state.workgroups.is_empty() && state.resident == 0 => Outcome::Done,
            None => Outcome::Unfinished,
        }
    }

    /// Waits until something of it may be to do or it has ended, or for a while.
    pub fn wait(&self, time: Duration) {
        let state = lock(&self.state);
        if state.running > 0 {
            drop(self.changed.wait_timeout(state, time));
        }
    }

    /// Waits until nothing of it runs.
    pub fn wait_idle(&self) {
        let mut state = lock(&self.state);
        while state.running > 0 {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Chooses a workgroup: a new one as long as the GPU has room, since others may wait for it, else the one that waits
    /// longest.
    fn choose(&self, worker: &mut Worker) -> Option<Resident> {
        let mut state = lock(&self.state);
        if state.ending.is_some() || self.stop.load(Ordering::Relaxed) {
            return None;
        }
        let waves = self.launch.waves();
        let has_room = state.resident < self.most_resident
            && (state.parked.is_empty()
                || self.waves.load(Ordering::Relaxed).saturating_add(waves) <= MAX_WAVES)
            && (self.launch.scratch.waves == 0 || state.free_places.len() >= waves as usize);
        let fresh = if has_room { state.workgroups.take(&self.launch) } else { None };
        let chosen = match fresh {
            Some(workgroup) => {
                let kept = state.free_places.len().saturating_sub(waves as usize);
                let places = if self.launch.scratch.waves == 0 {
                    Vec::new()
                } else {
                    state.free_places.split_off(kept)
                };
                state.resident += 1;
                state.running += 1;
                drop(state);
                self.waves.fetch_add(waves, Ordering::Relaxed);
                self.begin(workgroup, places, waves, worker)
            }
            None => {
                let parked = state.parked.pop_front()?;
                state.running += 1;
                parked
            }
        };
        Some(chosen)
    }

    fn begin(&self, workgroup: Workgroup, places: Vec<u32>, waves: u32, worker: &mut Worker) -> Resident {
        let mut group = worker.spare.take().unwrap_or_default();
        let number = self.begun.fetch_add(1, Ordering::Relaxed);
        let unit = number.checked_rem(self.units.len()).and_then(|index| self.units.get(index));
        let start = Start {
            entry: self.launch.entry,
            rsrc1: self.launch.rsrc1,
            rsrc2: self.launch.rsrc2,
            user: self.launch.user,
            id: workgroup.id,
            size: workgroup.size,
            group_segment: self.launch.group_segment,
            unit: unit.copied().unwrap_or(0),
        };
        let wave_bytes = self.launch.scratch.wave_bytes;
        group.begin(&start, |index| {
            places.get(index as usize).copied().unwrap_or(0).saturating_mul(wave_bytes)
        });
        Resident { group, waves, places }
    }

    /// Runs one workgroup of it for a turn. `stopping` is asked after each slice.
    pub fn turn(&self, worker: &mut Worker, stopping: &dyn Fn() -> bool) -> Turn {
        let Some(mut resident) = self.choose(worker) else { return Turn::Nothing };
        let since = self.cpu_time.as_ref().map(|spent| (spent, thread_time()));
        let end = self.run(&mut resident.group, worker, stopping);
        if let Some((spent, since)) = since {
            spent.fetch_add(thread_time().saturating_sub(since), Ordering::Relaxed);
        }
        let mut state = lock(&self.state);
        state.running -= 1;
        match end {
            Ok(Progress::More | Progress::Sleeps) => state.parked.push_back(resident),
            Ok(Progress::Done) => {
                self.retire(&mut state, resident, worker);
            }
            Err(failure) => {
                self.retire(&mut state, resident, worker);
                // The first one counts.
                state.ending.get_or_insert(Ending::Failed(failure));
            }
        }
        drop(state);
        self.changed.notify_all();
        Turn::Ran
    }

    fn retire(&self, state: &mut State, resident: Resident, worker: &mut Worker) {
        state.resident -= 1;
        self.waves.fetch_sub(resident.waves, Ordering::Relaxed);
        self.instructions.fetch_add(resident.group.instructions(), Ordering::Relaxed);
        state.free_places.extend(resident.places);
        worker.spare = Some(resident.group);
    }

    fn run(
        &self,
        group: &mut Group,
        worker: &mut Worker,
        stopping: &dyn Fn() -> bool,
    ) -> Result<Progress, Failure> {
        let Machine { gpu_id, table, world, target, .. } = &self.machine;
        worker.memory.begin_turn(self.number);
        let mut since = None;
        loop {
            let mut unit = worker.memory.slice(*gpu_id, *target, table.as_ref(), world.as_ref(), &self.gws);
            let progress = group.run(SLICE, &mut unit);
            let (messages, fault) = unit.end();
            for message in messages {
                world.interrupt(message);
            }
            match progress.map_err(|halt| failure(halt, fault))? {
                Progress::More => {}
                other => return Ok(other),
            }
            if stopping() {
                self.set_stop(true);
            }
            if self.stop.load(Ordering::Relaxed) {
                return Ok(Progress::More);
            }
            if since.get_or_insert_with(Instant::now).elapsed() >= TURN {
                return Ok(Progress::More);
            }
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let waves = state.parked.iter().map(|resident| resident.waves).sum();
        self.waves.fetch_sub(waves, Ordering::Relaxed);
    }
}

/// What a queue stops with.
fn failure(halt: Halt, fault: Option<Fault>) -> Failure {
    let Halt { pc, word: instruction, stop } = halt;
    match stop {
        Stop::Illegal => DispatchFailure::IllegalInstruction { pc, instruction }.into(),
        // A workgroup keeps it to itself that one of its waves waits.
        Stop::NotSupported { .. } | Stop::Wait => DispatchFailure::NotSupported { pc, instruction }.into(),
        Stop::Aperture { va } => DispatchFailure::Aperture { pc, va }.into(),
        Stop::Trap { id } => DispatchFailure::Trap { pc, trap: id }.into(),
        Stop::Fault(BusFault::Unaligned { va, size }) => Failure::Unaligned { va, size },
        Stop::Fault(BusFault::Page { va, .. }) => match fault {
            Some(fault) => fault.into(),
            // Each fault of a page was noted.
            None => DispatchFailure::Aperture { pc, va }.into(),
        },
    }
}
