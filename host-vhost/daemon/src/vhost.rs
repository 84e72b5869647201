//! The vhost-user back-end: what the VMM asks, and the virtqueues.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserShMemConfig, VhostUserVirtioFeatures};
use vhost::vhost_user::{Backend, GpuBackend};
use vhost_user_backend::{VhostUserBackend, VringRwLock, VringT};
use virtio_kfd_protocol::ShareToken;
use virtio_queue::{DescriptorChain, QueueT};
use vm_memory::{GuestAddressSpace, GuestMemoryAtomic, GuestMemoryBackend};
use vmm_sys_util::epoll::EventSet;
use zerocopy::IntoBytes;

use crate::budget::{STOP, WORKER_REPLY, WORKER_START};
use crate::chain::{self, Output, Ram};
use crate::command::{self, Config};
use crate::guest_warn;
use crate::mapper::{SharedBackend, WINDOW_ID};
use crate::pool::{Progress, Reclaim};
use crate::session::{Reclaiming, Session};
use crate::vring::{self, Next, give_back, next_chain, signal, wants_more};

/// Control and cursor queue.
pub const QUEUES: usize = 2;

/// The control queue.
const CONTROL: u16 = 0;
/// The cursor queue, on which nothing is expected.
const CURSOR: u16 = 1;
/// Event number under which [`Session::descriptor`] is registered; queues and the crate's own event come before.
pub const SESSION_EVENT: u64 = 3;

/// Longest queue: crosvm asks for as many unless told otherwise, and gives up on less.
const MAX_QUEUE_SIZE: usize = 32 * 1024;

/// How long workers may take to give memory of the pool back: as long as they may take for anything, and to end.
const RECLAIM: Duration = WORKER_START.saturating_add(WORKER_REPLY).saturating_add(STOP);

/// How often the end of that is looked for at least.
const RECLAIM_LOOK: Duration = Duration::from_millis(20);

/// Chains between two looks at what the workers say.
const COMMANDS_PER_TURN: usize = 64;

/// What QEMU offers a guest less than this cannot use.
pub const NEEDS: &str = "the guest's driver must take VIRTIO_GPU_F_VIRGL, RESOURCE_BLOB and CONTEXT_INIT; QEMU offers them from \
                     version 11.1 with -device vhost-user-test-device-pci,virtio-id=16,num_vqs=2,vq_size=1024,config_size=20, \
                     not with vhost-user-gpu-pci";

/// The back-end. All of its state is behind one lock, which nobody holds while waiting for the VMM or a worker.
pub struct Device {
    state: Mutex<State>,
    changed: Condvar,
    backend: SharedBackend,
    window: u64,
}

struct State {
    session: Session,
    control: Option<VringRwLock>,
    /// Whether any driver of this connection took the features that contexts need; none while no driver was there.
    usable: Option<bool>,
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device").field("window", &self.window).finish_non_exhaustive()
    }
}

/// How a turn with a queue went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    /// There may be more.
    More,
    /// Nothing more until the next notification.
    Over,
}

impl Device {
    /// A device around a session that shares `backend` with it.
    pub fn new(session: Session, backend: SharedBackend, window: u64) -> Self {
        let state = State { session, control: None, usable: None };
        Device { state: Mutex::new(state), changed: Condvar::new(), backend, window }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The descriptor to be registered under [`SESSION_EVENT`].
    pub fn session_descriptor(&self) -> RawFd {
        self.lock().session.descriptor().as_raw_fd()
    }

    /// Whether drivers came and none of them could use the device.
    pub fn was_unusable(&self) -> bool {
        self.lock().usable == Some(false)
    }

    /// Whether a driver came that could use the device.
    pub fn was_usable(&self) -> bool {
        self.lock().usable == Some(true)
    }

    /// Whether a VMM came as far as features, and brought no memory of its guest.
    pub fn lacks_memory(&self) -> bool {
        let state = self.lock();
        state.usable.is_some() && state.session.ram().num_regions() == 0
    }

    /// Serves the control queue until it is empty.
    fn serve_control(&self, vring: &VringRwLock) {
        while self.control_turn(vring) == Turn::More {
            self.attend();
        }
    }

    /// Takes some commands. A driver that adds more all the time keeps neither workers nor deadlines waiting.
    fn control_turn(&self, vring: &VringRwLock) -> Turn {
        let mut idle = false;
        for _ in 0..COMMANDS_PER_TURN {
            let mut state = self.lock();
            state.control.get_or_insert_with(|| vring.clone());
            let ram = state.session.ram().clone();
            let queue_size = vring.get_ref().get_queue().size();
            state.session.set_queue_size(queue_size);
            if !state.session.has_room(queue_size) {
                // A driver that keeps the rules never comes here. The next completion goes on.
                state.flush();
                return Turn::Over;
            }
            match next_chain(vring, ram.clone(), state.session.log()) {
                Next::Chain(chain, head) => {
                    idle = false;
                    state.session.start();
                    take_command(&mut state, vring, &ram, chain, head);
                }
                Next::Empty if !idle && wants_more(vring, &ram) => idle = true,
                Next::Empty | Next::Dead => {
                    state.flush();
                    return Turn::Over;
                }
            }
        }
        Turn::More
    }

    /// Gives back what the guest puts on the cursor queue, which is for nothing, until it is empty. All else goes on
    /// meanwhile.
    fn serve_cursor(&self, vring: &VringRwLock, control: Option<&VringRwLock>) {
        let mut left_some = false;
        while self.cursor_turn(vring) == Turn::More {
            self.attend();
            left_some = control.is_some_and(|control| self.control_turn(control) == Turn::More);
        }
        // The notification for those may be used up.
        if let (true, Some(control)) = (left_some, control) {
            self.serve_control(control);
        }
    }

    fn cursor_turn(&self, vring: &VringRwLock) -> Turn {
        let mut idle = false;
        let mut state = self.lock();
        let ram = state.session.ram().clone();
        let mut turn = Turn::More;
        for _ in 0..COMMANDS_PER_TURN {
            match next_chain(vring, ram.clone(), state.session.log()) {
                Next::Chain(_, head) => {
                    idle = false;
                    give_back(vring, &ram, head, 0);
                }
                Next::Empty if !idle && wants_more(vring, &ram) => idle = true,
                Next::Empty | Next::Dead => {
                    turn = Turn::Over;
                    break;
                }
            }
        }
        signal(vring, &ram);
        turn
    }

    /// Messages of workers and the supervisor, outcomes of maps, deadlines. Returns whether commands were given back.
    fn attend(&self) -> bool {
        let mut state = self.lock();
        state.session.poll();
        let gave_back = state.flush();
        if state.session.is_orphaned() {
            tracing::error!("the supervisor is gone");
            std::process::exit(1);
        }
        self.changed.notify_all();
        gave_back
    }

    fn serve_session(&self) {
        let gave_back = self.attend();
        let control = self.lock().control.clone();
        // The queue may have been left alone because too much was in flight.
        if let (true, Some(control)) = (gave_back, control) {
            self.serve_control(&control);
        }
    }

    /// Ends all contexts and gives back all commands. QEMU does not tell a reset from a pause, and after a reset
    /// the guest's memory is used for something else, so nothing may be left that a GPU writes to.
    fn stop(&self) {
        let deadline = Instant::now().checked_add(STOP);
        let mut state = self.lock();
        state.session.begin_stop();
        while !state.session.is_stopped() {
            let left = deadline.and_then(|end| end.checked_duration_since(Instant::now()));
            let Some(left) = left.filter(|left| !left.is_zero()) else { break };
            // The queue's thread hears from the supervisor meanwhile.
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.session.finish_stop();
        state.flush();
        state.control = None;
    }
}

impl Reclaim for Device {
    fn begin(&self, name: ShareToken) -> Reclaiming {
        self.lock().session.begin_reclaim(name)
    }

    fn look(&self, reclaiming: &Reclaiming, since: Instant) -> Progress {
        match self.lock().session.is_reclaimed(reclaiming) {
            true => Progress::Over,
            false if since.elapsed() >= RECLAIM => Progress::Kept,
            false => Progress::Pending,
        }
    }

    fn wait(&self) {
        // The queue's thread hears from workers and supervisor meanwhile.
        drop(self.changed.wait_timeout(self.lock(), RECLAIM_LOOK));
    }
}

impl State {
    /// Gives back the commands that are done. Returns whether there were any.
    fn flush(&mut self) -> bool {
        let completed = self.session.take_completed();
        let Some(control) = &self.control else { return !completed.is_empty() };
        let ram = self.session.ram();
        for done in &completed {
            let written = done.output.write(ram, &done.bytes);
            give_back(control, ram, done.output.head(), written);
        }
        if !completed.is_empty() {
            signal(control, ram);
        }
        !completed.is_empty()
    }
}

fn take_command(
    state: &mut State,
    vring: &VringRwLock,
    ram: &Arc<Ram>,
    chain: DescriptorChain<Arc<Ram>>,
    head: u16,
) {
    let refused = match chain::open(ram, chain) {
        Ok((input, output)) => state.session.command(input, output).map_err(|(error, _): (_, Output)| error),
        Err(error) => Err(error),
    };
    if let Err(error) = refused {
        guest_warn!(state.session.log(), "{error}");
        give_back(vring, ram, head, 0);
        signal(vring, ram);
    }
}

impl VhostUserBackend for Device {
    type Bitmap = ();
    type Vring = VringRwLock;

    fn num_queues(&self) -> usize {
        QUEUES
    }

    fn max_queue_size(&self) -> usize {
        MAX_QUEUE_SIZE
    }

    fn features(&self) -> u64 {
        vring::FEATURES | command::FEATURES | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
    }

    fn acked_features(&self, features: u64) {
        let mut state = self.lock();
        state.session.set_features(features);
        let enough = features & command::FEATURES == command::FEATURES;
        state.usable = Some(enough || state.usable == Some(true));
        // Firmware drives the device for its boot screen and takes nothing of this, so it is no error yet.
        if !enough {
            guest_warn!(state.session.log(), "features {features:#x}: no context can be made: {NEEDS}");
        } else if !state.session.has_window() {
            guest_warn!(
                state.session.log(),
                "this VMM has no shared memory window (QEMU has from 11.1): the guest's CPU reaches VRAM by copies"
            );
        }
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        vring::protocol_features()
    }

    fn reset_device(&self) {
        tracing::debug!("reset");
        self.stop();
    }

    fn set_event_idx(&self, _enabled: bool) {}

    fn get_config(&self, offset: u32, size: u32) -> Vec<u8> {
        let config = Config { events_read: 0, events_clear: 0, num_scanouts: 0, num_capsets: 1 };
        vring::config_piece(config.as_bytes().to_vec(), offset, size)
    }

    fn set_config(&self, offset: u32, buf: &[u8]) -> io::Result<()> {
        // events_clear: there are no events. An error would end the connection.
        tracing::debug!("config space: {} bytes written at {offset}, ignored", buf.len());
        Ok(())
    }

    fn update_memory(&self, memory: GuestMemoryAtomic<Ram>) -> io::Result<()> {
        let table = memory.memory();
        // An error becomes a refusal where the VMM asks for an answer, and ends the connection.
        self.lock().session.update_memory(&table)
    }

    fn set_backend_req_fd(&self, backend: Backend) {
        *self.backend.lock().unwrap_or_else(PoisonError::into_inner) = Some(backend);
    }

    fn set_gpu_socket(&self, _gpu: GpuBackend) -> io::Result<()> {
        // What vhost-user-gpu-pci sends; an error would end the connection without a word to the user.
        tracing::warn!("the VMM sent a display socket, which is ignored: {NEEDS}");
        Ok(())
    }

    fn get_shmem_config(&self) -> io::Result<VhostUserShMemConfig> {
        self.lock().session.enable_window();
        let mut sizes = [0; WINDOW_ID as usize + 1];
        if let Some(last) = sizes.last_mut() {
            *last = self.window;
        }
        Ok(VhostUserShMemConfig::new(1, &sizes))
    }

    fn stop_vring(&self, queue: u32) -> io::Result<()> {
        if queue == u32::from(CONTROL) {
            tracing::debug!("the control queue is stopped");
            self.stop();
        }
        Ok(())
    }

    fn handle_event(
        &self,
        event: u16,
        _set: EventSet,
        vrings: &[VringRwLock],
        _thread: usize,
    ) -> io::Result<()> {
        match (event, vrings.get(usize::from(event))) {
            (CONTROL, Some(vring)) => self.serve_control(vring),
            (CURSOR, Some(vring)) => self.serve_cursor(vring, vrings.get(usize::from(CONTROL))),
            _ => self.serve_session(),
        }
        Ok(())
    }
}
