//! Things done in a child process that may be killed for it.

use kfd_sandbox::seccomp::{Check, Rule};
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};
use seccompiler::{BpfProgram, apply_filter};

/// How a child ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It ended by itself, with this status.
    Exited(i32),
    /// seccomp killed it.
    Killed,
    /// Something else did.
    Signal(Signal),
}

/// Runs `body` in a child.
pub fn run(body: impl FnOnce() -> u8) -> Outcome {
    // SAFETY: glibc's fork leaves its own locks usable in the child; the body uses no lock of this program,
    // and the child ends without running anything else.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            setrlimit(Resource::RLIMIT_CORE, 0, 0).unwrap();
            let status = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or(101);
            // SAFETY: ends the process.
            unsafe { libc::syscall(libc::SYS_exit_group, i64::from(status)) };
            unreachable!("exit_group returned");
        }
        ForkResult::Parent { child } => match waitpid(child, None).unwrap() {
            WaitStatus::Exited(_, status) => Outcome::Exited(status),
            WaitStatus::Signaled(_, Signal::SIGSYS, _) => Outcome::Killed,
            WaitStatus::Signaled(_, signal, _) => Outcome::Signal(signal),
            other => panic!("{other:?}"),
        },
    }
}

/// Makes one system call in a child under these filters.
pub fn call(programs: &[BpfProgram], number: i64, arguments: [u64; 6]) -> Outcome {
    run(|| {
        for program in programs {
            apply_filter(program).unwrap();
        }
        let [a, b, c, d, e, f] = arguments;
        // SAFETY: the arguments are numbers that lead the kernel to no memory of this process but what the
        // caller meant; the child ends right after.
        unsafe { libc::syscall(number, a, b, c, d, e, f) };
        0
    })
}

/// Arguments that hold to the checks, and are -1 (no descriptor, no address) elsewhere.
pub fn fitting(checks: &[Check]) -> [u64; 6] {
    let mut arguments = [u64::MAX; 6];
    for check in checks {
        match *check {
            Check::Is(argument, value) => arguments[usize::from(argument)] = value.into(),
            Check::Without(argument, bits) => arguments[usize::from(argument)] &= !u64::from(bits),
            Check::Within(argument, mask, value) => {
                arguments[usize::from(argument)] &= u64::from(!mask);
                arguments[usize::from(argument)] |= u64::from(value);
            }
        }
    }
    arguments
}

/// Whether the rules let a call pass, worked out here once more.
pub fn permits(rules: &[Rule], number: i64, arguments: &[u64; 6]) -> bool {
    rules.iter().filter(|rule| rule.number == number).any(|rule| {
        rule.checks.iter().all(|check| match *check {
            Check::Is(argument, value) => arguments[usize::from(argument)] as u32 == value,
            Check::Without(argument, bits) => arguments[usize::from(argument)] as u32 & bits == 0,
            Check::Within(argument, mask, value) => arguments[usize::from(argument)] as u32 & mask == value,
        })
    })
}

/// Arguments that differ from fitting ones in a single check, and that no other rule lets pass.
pub fn near_misses(rules: &[Rule], rule: &Rule) -> Vec<[u64; 6]> {
    let mut misses = Vec::new();
    for check in &rule.checks {
        let (argument, values) = match *check {
            Check::Is(argument, value) => {
                let others =
                    [value ^ 1, value.wrapping_add(1), value ^ 1 << 17, value ^ 1 << 31, 0, u32::MAX];
                (argument, others.to_vec())
            }
            Check::Without(argument, bits) => (argument, vec![bits, bits | 3, u32::MAX]),
            Check::Within(argument, mask, value) => {
                let (first, last) = (value, value | !mask);
                (argument, vec![first.wrapping_sub(1), last.wrapping_add(1), first ^ 1 << 31, 0, u32::MAX])
            }
        };
        for value in values {
            let mut arguments = fitting(&rule.checks);
            arguments[usize::from(argument)] = value.into();
            if !permits(rules, rule.number, &arguments) {
                misses.push(arguments);
            }
        }
    }
    misses
}
