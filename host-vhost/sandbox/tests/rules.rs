//! Each rule of each list: what it allows passes, near misses and all other system calls are killed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic, unsafe_code)]
#![allow(clippy::multiple_unsafe_ops_per_block)] // raw system calls in children are what is tested

mod child;

use child::{Outcome, call, fitting, near_misses, permits, run};
use kfd_sandbox::lists::{device, model, never, never_with_model, worker};
use kfd_sandbox::seccomp::{Rule, allow_list, deny_list, no_clone3};
use seccompiler::{BpfProgram, apply_filter};

/// Highest number of the x86-64 table in Linux 7.0, with some to spare.
const LAST_CALL: i64 = 480;
/// arch/x86/entry/syscalls/syscall_64.tbl
const URETPROBE: i64 = 335;
/// arch/x86/entry/syscalls/syscall_64.tbl
const UPROBE: i64 = 336;

fn lists() -> [(&'static str, Vec<Rule>); 3] {
    let with_model = worker(3).into_iter().chain(model()).collect();
    [("worker", worker(3)), ("worker on the model", with_model), ("device", device())]
}

fn programs(rules: &[Rule]) -> Vec<BpfProgram> {
    vec![no_clone3().unwrap(), allow_list(rules).unwrap()]
}

#[test]
fn what_a_rule_allows_passes() {
    for (list, rules) in lists() {
        let programs = programs(&rules);
        for rule in &rules {
            // A thread with a stack at -1 crashes; threads have a test of their own.
            if rule.number == libc::SYS_clone {
                continue;
            }
            let outcome = call(&programs, rule.number, fitting(&rule.checks));
            assert!(matches!(outcome, Outcome::Exited(_)), "{list}: {rule:?}: {outcome:?}");
        }
    }
}

#[test]
fn near_misses_are_killed() {
    for (list, rules) in lists() {
        let programs = programs(&rules);
        for rule in &rules {
            let always = rules.iter().any(|other| other.number == rule.number && other.checks.is_empty());
            let misses = near_misses(&rules, rule);
            assert!(always || !misses.is_empty(), "{list}: {rule:?} has no near miss");
            for arguments in misses {
                let outcome = call(&programs, rule.number, arguments);
                assert_eq!(outcome, Outcome::Killed, "{list}: {} {arguments:x?}", rule.name);
            }
        }
    }
}

#[test]
fn every_other_call_is_killed() {
    for (list, rules) in lists() {
        let programs = programs(&rules);
        for number in 0..=LAST_CALL {
            // Linux lets its own trampolines for probes pass every filter since 6.14 (kernel/seccomp.c); elsewhere
            // than in a trampoline they fail.
            if matches!(number, URETPROBE | UPROBE) || rules.iter().any(|rule| rule.number == number) {
                continue;
            }
            let outcome = call(&programs, number, [u64::MAX; 6]);
            assert_eq!(outcome, Outcome::Killed, "{list}: system call {number}");
        }
    }
}

/// The x32 table begins at bit 30 (`__X32_SYSCALL_BIT`, asm/unistd.h) and would be a second way to each call.
#[test]
fn the_other_table_of_the_same_machine_is_killed() {
    for (list, rules) in lists() {
        for number in [0, 1, libc::SYS_mmap, libc::SYS_ioctl] {
            let outcome = call(&programs(&rules), 1 << 30 | number, [u64::MAX; 6]);
            assert_eq!(outcome, Outcome::Killed, "{list}: {number}");
        }
    }
}

/// An ioctl with a known number but another size, direction or type is another request.
#[test]
fn ioctls_are_compared_whole() {
    let rules = worker(3);
    let programs = programs(&rules);
    for rule in rules.iter().filter(|rule| rule.number == libc::SYS_ioctl) {
        let request = fitting(&rule.checks)[1];
        for bits in [0xff, 0x100, 0x2_0000, 0x8_0000, 0x4000_0000, 0x8000_0000] {
            let arguments = [u64::MAX, request ^ bits, u64::MAX, 0, 0, 0];
            if !permits(&rules, libc::SYS_ioctl, &arguments) {
                assert_eq!(call(&programs, libc::SYS_ioctl, arguments), Outcome::Killed, "{arguments:x?}");
            }
        }
        // The kernel takes an unsigned int.
        let high = [u64::MAX, request | 1 << 32, u64::MAX, 0, 0, 0];
        assert_eq!(call(&programs, libc::SYS_ioctl, high), Outcome::Exited(0));
    }
}

#[test]
fn threads_start_and_end_and_memory_never_becomes_executable() {
    for (list, rules) in lists() {
        let programs = programs(&rules);
        let outcome = run(|| {
            programs.iter().for_each(|program| apply_filter(program).unwrap());
            let thread = std::thread::Builder::new().name("named".into());
            let sum = thread.spawn(|| vec![1u8; 4 << 20].iter().map(|&x| u64::from(x)).sum::<u64>());
            u8::try_from(sum.unwrap().join().unwrap() >> 20).unwrap()
        });
        assert_eq!(outcome, Outcome::Exited(4), "{list}");
        let fork = [libc::SIGCHLD as u64, 0, 0, 0, 0, 0];
        assert_eq!(call(&programs, libc::SYS_clone, fork), Outcome::Killed, "{list}");
        let executable = [0, 4096, 7, 0x22, u64::MAX, 0];
        assert_eq!(call(&programs, libc::SYS_mmap, executable), Outcome::Killed, "{list}");
    }
}

#[test]
fn clone3_is_answered_as_by_a_kernel_without_it() {
    let programs = programs(&worker(3));
    let outcome = run(|| {
        programs.iter().for_each(|program| apply_filter(program).unwrap());
        // SAFETY: a size of 0 is refused before anything is read.
        let result = unsafe { libc::syscall(libc::SYS_clone3, 0, 0) };
        u8::from(result == -1 && std::io::Error::last_os_error().raw_os_error() == Some(libc::ENOSYS))
    });
    assert_eq!(outcome, Outcome::Exited(1));
}

#[test]
fn the_deny_list_kills_what_it_names_and_nothing_else() {
    let programs = [deny_list(never()).unwrap()];
    for (number, name) in never() {
        assert_eq!(call(&programs, *number, [u64::MAX; 6]), Outcome::Killed, "{name}");
    }
    // kill(-1) is left out: it would reach every process of the user.
    for number in [libc::SYS_openat, libc::SYS_execve, libc::SYS_wait4, libc::SYS_prctl] {
        assert!(matches!(call(&programs, number, [u64::MAX; 6]), Outcome::Exited(_)), "{number}");
    }
}

#[test]
fn the_model_takes_one_call_off_the_deny_list() {
    let with_model = never_with_model();
    let without: Vec<&str> =
        never().iter().filter(|call| !with_model.contains(call)).map(|(_, name)| *name).collect();
    assert_eq!((without.as_slice(), with_model.len() + 1), (["SYS_userfaultfd"].as_slice(), never().len()));
    // What a worker on the model may do of it; without the model the call is on no list of what is allowed.
    let programs = [deny_list(&with_model).unwrap()];
    assert!(matches!(call(&programs, libc::SYS_userfaultfd, [1, 0, 0, 0, 0, 0]), Outcome::Exited(_)));
}
