//! Global wave sync: semaphores and barriers of waves of different workgroups (`ds_gws_*`).
//!
//! Source: AMD, "Vega" 7nm Instruction Set Architecture, DS_GWS_INIT and those that follow it.

/// How many resources a queue has that was given global wave sync.
pub const RESOURCES: usize = 64;

/// What a wave asks of a resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Sets the counter (`ds_gws_init`).
    Init(u32),
    /// Adds to the counter of a semaphore (`ds_gws_sema_v`, `ds_gws_sema_br`).
    Release(u32),
    /// Lets all waves go that wait for a semaphore (`ds_gws_sema_release_all`).
    ReleaseAll,
    /// Takes one from the counter of a semaphore as soon as it is not 0 (`ds_gws_sema_p`).
    Acquire,
    /// Waits until as many waves as the counter says have come before it; the last one sets the counter for the next
    /// time (`ds_gws_barrier`).
    Barrier(u32),
}

/// What a wave that has to wait keeps, and shows when it asks again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(u32);

#[derive(Clone, Copy, Debug, Default)]
struct Resource {
    counter: u32,
    /// Counts how often all that wait were let go.
    generation: u32,
}

/// The resources of a queue.
#[derive(Clone, Debug)]
pub struct Gws([Resource; RESOURCES]);

impl Default for Gws {
    fn default() -> Self {
        Self([Resource::default(); RESOURCES])
    }
}

impl Gws {
    /// Does what a wave asks of a resource (modulo [`RESOURCES`]). With a ticket the wave is to ask again with it; what
    /// it asked for is not done yet then. `ticket` is what it got the last time that it asked the same.
    pub fn ask(&mut self, resource: u32, operation: Operation, ticket: Option<Ticket>) -> Option<Ticket> {
        let resource = self.0.get_mut(resource as usize % RESOURCES)?;
        let waiting = Some(Ticket(resource.generation));
        match operation {
            Operation::Init(counter) => resource.counter = counter,
            Operation::Release(count) => resource.counter = resource.counter.saturating_add(count),
            Operation::ReleaseAll => resource.generation = resource.generation.wrapping_add(1),
            Operation::Acquire => {
                let released = ticket.is_some() && ticket != waiting;
                if !released {
                    match resource.counter.checked_sub(1) {
                        Some(left) => resource.counter = left,
                        None => return waiting,
                    }
                }
            }
            Operation::Barrier(next) => match ticket {
                Some(_) if ticket == waiting => return waiting,
                Some(_) => {}
                None => match resource.counter.checked_sub(1) {
                    Some(left) => {
                        resource.counter = left;
                        return waiting;
                    }
                    None => {
                        resource.counter = next;
                        resource.generation = resource.generation.wrapping_add(1);
                    }
                },
            },
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::{Group, Progress};
    use crate::testing::{Machine, start};

    #[test]
    fn waves_wait_and_go_on() {
        let mut machine = Machine::new(&[
            0xbefc_00ff, // s_mov_b32 m0, 0x20000
            0x0002_0000,
            0xd939_0003, // ds_gws_sema_p offset:3 gds
            0x0000_0000,
            0xbf90_0001, // s_sendmsg sendmsg(MSG_INTERRUPT)
            0x7e00_0287, // v_mov_b32 v0, 7
            0xd933_0004, // ds_gws_init v0 offset:4 gds
            0x0000_0000,
            0xd935_0003, // ds_gws_sema_v offset:3 gds
            0x0000_0000,
            0xbf81_0000, // s_endpgm
        ]);
        // Two waves, and nothing in the semaphore, which is resource 2 + 3.
        let mut group = Group::default();
        group.begin(&start(128), |_| 0);
        for _ in 0..3 {
            assert_eq!(group.run(100, &mut machine), Ok(Progress::Sleeps));
        }
        assert!(machine.messages.is_empty());
        machine.gws.ask(5, Operation::Release(1), None);
        // The first one lets the second one in.
        machine.run(&mut group).unwrap();
        assert_eq!(machine.messages.len(), 2);
        assert_eq!(machine.gws.ask(5, Operation::Acquire, None), None);
        assert!(machine.gws.ask(5, Operation::Acquire, None).is_some());
        // Resource 2 + 4 was given 7.
        for _ in 0..7 {
            assert_eq!(machine.gws.ask(6, Operation::Acquire, None), None);
        }
        assert!(machine.gws.ask(6, Operation::Acquire, None).is_some());
    }

    #[test]
    fn a_semaphore_lets_as_many_in_as_it_counts() {
        let mut gws = Gws::default();
        assert_eq!(gws.ask(5, Operation::Init(2), None), None);
        assert_eq!(gws.ask(5, Operation::Acquire, None), None);
        // 64 more is the same one.
        assert_eq!(gws.ask(69, Operation::Acquire, None), None);
        let ticket = gws.ask(5, Operation::Acquire, None);
        assert!(ticket.is_some());
        assert_eq!(gws.ask(5, Operation::Acquire, ticket), ticket);
        // Another resource is another one.
        assert!(gws.ask(6, Operation::Acquire, None).is_some());
        assert_eq!(gws.ask(5, Operation::Release(1), None), None);
        assert_eq!(gws.ask(5, Operation::Acquire, ticket), None);
        assert!(gws.ask(5, Operation::Acquire, None).is_some());
    }

    #[test]
    fn all_that_wait_for_a_semaphore_are_let_go_and_no_others() {
        let mut gws = Gws::default();
        let first = gws.ask(0, Operation::Acquire, None);
        let second = gws.ask(0, Operation::Acquire, None);
        assert!(first.is_some() && second.is_some());
        gws.ask(0, Operation::ReleaseAll, None);
        assert_eq!(gws.ask(0, Operation::Acquire, first), None);
        assert_eq!(gws.ask(0, Operation::Acquire, second), None);
        assert!(gws.ask(0, Operation::Acquire, None).is_some());
    }

    #[test]
    fn a_barrier_opens_when_the_last_one_comes_and_can_be_used_again() {
        let mut gws = Gws::default();
        // Three waves: two that wait and one that opens.
        gws.ask(0, Operation::Init(2), None);
        for _ in 0..2 {
            let first = gws.ask(0, Operation::Barrier(2), None);
            let second = gws.ask(0, Operation::Barrier(2), None);
            assert!(first.is_some() && second.is_some());
            assert_eq!(gws.ask(0, Operation::Barrier(2), first), first);
            assert_eq!(gws.ask(0, Operation::Barrier(2), None), None);
            assert_eq!(gws.ask(0, Operation::Barrier(2), second), None);
            assert_eq!(gws.ask(0, Operation::Barrier(2), first), None);
        }
    }
}
