//! The agent's program: process 1 of a test guest, and with `serve` the agent itself.

use std::process::ExitCode;

use kfd_agent::{init, port, session};

fn main() -> ExitCode {
    if std::env::args().nth(1).as_deref() != Some("serve") {
        if std::process::id() != 1 {
            eprintln!("kfd-agent is the first process of a test guest; it is not started by hand");
            return ExitCode::FAILURE;
        }
        init::run();
        return ExitCode::SUCCESS;
    }
    let served = port::open().and_then(|port| {
        let writer = port.try_clone()?;
        session::serve(port::Patient(port), writer, init::hello())
    });
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kfd-agent: {error}");
            ExitCode::FAILURE
        }
    }
}
