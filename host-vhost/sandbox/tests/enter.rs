//! The whole sandbox, entered in child processes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic, unsafe_code)]
#![allow(dead_code)] // the helper serves two tests

mod child;

use std::fs::File;
use std::io::ErrorKind;

use caps::CapSet;
use child::{Outcome, run};
use kfd_sandbox::files::Files;
use kfd_sandbox::{Role, enter, files, privileges};
use nix::unistd::{Uid, setuid};

const WORKER: Role = Role::Worker { channel: 3, model: false };
const SUPERVISOR: Role = Role::Supervisor { model: false };

/// Root and an ordinary user where the test runs as root, else the user alone.
fn users() -> Vec<Option<Uid>> {
    if Uid::effective().is_root() { vec![None, Some(Uid::from_raw(65534))] } else { vec![None] }
}

fn as_user(user: Option<Uid>, body: impl FnOnce() -> u8) -> Outcome {
    run(|| {
        if let Some(user) = user {
            setuid(user).unwrap();
        }
        body()
    })
}

#[test]
fn every_role_can_be_entered_by_every_user() {
    for user in users() {
        for role in [WORKER, Role::Worker { channel: 3, model: true }, Role::Device, SUPERVISOR] {
            let outcome = as_user(user, || match enter(role) {
                Ok(_) => 0,
                Err(error) => {
                    eprintln!("{error}");
                    1
                }
            });
            assert_eq!(outcome, Outcome::Exited(0), "{role:?} as {user:?}");
        }
    }
}

#[test]
fn no_capability_is_left() {
    for user in users() {
        let outcome = as_user(user, || {
            let dropped = privileges::drop_capabilities().unwrap();
            let empty = |set| caps::read(None, set).unwrap().is_empty();
            let own = [CapSet::Effective, CapSet::Permitted, CapSet::Inheritable, CapSet::Ambient];
            assert!(own.into_iter().all(empty));
            assert_eq!(dropped.bounding, empty(CapSet::Bounding));
            assert!(dropped.bounding || user.is_some() || !Uid::effective().is_root());
            0
        });
        assert_eq!(outcome, Outcome::Exited(0), "{user:?}");
    }
}

#[test]
fn landlock_denies_files_and_leaves_open_ones() {
    let outcome = run(|| {
        let open = File::open("/proc/self/status").unwrap();
        match files::deny_all().unwrap() {
            Files::Unavailable => 2,
            Files::Denied { abi } => {
                assert!(abi >= 1);
                let error = File::open("/proc/self/status").unwrap_err();
                assert_eq!(error.kind(), ErrorKind::PermissionDenied);
                assert!(std::io::read_to_string(open).unwrap().contains("NoNewPrivs:\t1"));
                0
            }
        }
    });
    match outcome {
        Outcome::Exited(0) => {}
        Outcome::Exited(2) => eprintln!("skipped: this kernel has no Landlock"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_confined_worker_dies_where_it_opens_a_file() {
    let outcome = run(|| {
        enter(WORKER).unwrap();
        u8::from(File::open("/dev/null").is_ok())
    });
    assert_eq!(outcome, Outcome::Killed);
}

#[test]
fn a_supervisor_still_starts_processes() {
    let outcome = run(|| {
        enter(SUPERVISOR).unwrap();
        let status = std::process::Command::new("/bin/sh").args(["-c", "exit 7"]).status().unwrap();
        u8::try_from(status.code().unwrap()).unwrap()
    });
    assert_eq!(outcome, Outcome::Exited(7));
}

#[test]
fn the_report_says_what_was_done() {
    let outcome = run(|| {
        let text = enter(Role::Device).unwrap().to_string();
        u8::from(
            text.contains("no capabilities") && text.contains("Landlock") && text.contains("system calls"),
        )
    });
    assert_eq!(outcome, Outcome::Exited(1));
}
