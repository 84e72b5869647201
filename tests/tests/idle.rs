//! What waiting costs, in loop-back: blocked waits and idle queues take next to no CPU time, on either side, and do not hold up
//! calls. The program: tests/c/idle.c. In a guest: `qemu_idle`.
#![allow(clippy::unwrap_used, clippy::panic, reason = "all of this is tests")]

use std::time::Duration;

use virtio_kfd_tests::talk::{OnHost, Talk};
use virtio_kfd_tests::thunk_stack::SET;
use virtio_kfd_tests::{Artifacts, ThunkStack, cpu_time, need};

const LIMIT: Duration = Duration::from_secs(120);

/// How long nothing happens.
const IDLE: Duration = Duration::from_secs(10);

/// CPU time of a blocked wait in that time, of guest and host together.
const OF_A_WAIT: Duration = Duration::from_millis(10);

/// A hundredth of a core in that time.
const OF_QUEUES: Duration = Duration::from_millis(100);

/// How much slower the median call may be beside blocked waits. One that was held up by a wait would last until that one's
/// event is set, which is after all calls, or for a turn on its ring, thousands of calls long; a machine with other work may
/// take several times as long for a call as before. The test prints it.
const DELAY: f64 = 10.0;

/// What a run of the program has shown.
struct Cost {
    /// What it printed before it was ready.
    said: Vec<String>,
    /// CPU time of the program while nothing happened.
    guest: Duration,
    /// CPU time of daemon and worker meanwhile.
    host: Duration,
}

impl Cost {
    fn sum(&self) -> Duration {
        self.guest + self.host
    }
}

fn stack() -> anyhow::Result<ThunkStack> {
    Ok(ThunkStack::start(Artifacts::for_thunk(&[], &[SET])?, "idle").unwrap())
}

fn cost(stack: &ThunkStack, arguments: &[&str]) -> Cost {
    let command = stack.command(&stack.ours().unwrap(), arguments);
    let mut process: Box<OnHost> = Box::new(OnHost::start(command, LIMIT).unwrap());
    let mut said = Vec::new();
    loop {
        match process.next_line(LIMIT).unwrap() {
            Some(line) if line == "ready" => break,
            Some(line) => said.push(line),
            None => panic!("{arguments:?} ended early: {said:?}\n{}", stack.daemon().report()),
        }
    }
    let processes = stack.daemon().processes();
    let before = cpu_time::of(&processes).unwrap();
    std::thread::sleep(IDLE);
    let host = cpu_time::since(&processes, before).unwrap();
    process.say("").unwrap();
    let used = process.next_line(LIMIT).unwrap().unwrap();
    let guest = used.split(' ').nth(1).unwrap().parse().unwrap();
    assert_eq!(process.next_line(LIMIT).unwrap().as_deref(), Some("close: SUCCESS"));
    process.finish().unwrap();
    let cost = Cost { said, guest: Duration::from_micros(guest), host };
    println!("{}: {:?} in the guest, {host:?} on the host in {IDLE:?}", arguments.join(" "), cost.guest);
    cost
}

#[test]
fn a_blocked_wait_costs_nothing() {
    let stack = need!(stack());
    let cost = cost(&stack, &["wait"]);
    assert!(cost.sum() < OF_A_WAIT, "{:?}", cost.sum());
}

#[test]
fn idle_queues_cost_nothing() {
    let stack = need!(stack());
    let cost = cost(&stack, &["queues", "64"]);
    assert!(cost.sum() < OF_QUEUES, "{:?}", cost.sum());
}

#[test]
fn blocked_waits_do_not_delay_calls() {
    let stack = need!(stack());
    let cost = cost(&stack, &["waits", "64"]);
    let [line] = cost.said.as_slice() else { panic!("{:?}", cost.said) };
    println!("{line}");
    let ratio: f64 = line.strip_prefix("ratio ").unwrap().split(' ').next().unwrap().parse().unwrap();
    assert!(ratio < DELAY, "{line}");
}
