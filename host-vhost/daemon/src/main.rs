//! `vhost-user-kfd`: see the library.

use std::process::ExitCode;

use clap::Parser;
use vhost_user_kfd::cli::{Args, capabilities};
use vhost_user_kfd::device::{Served, UNUSABLE};
use vhost_user_kfd::{device, supervisor};

fn main() -> ExitCode {
    let args = Args::parse();
    if args.print_capabilities {
        println!("{}", capabilities());
        return ExitCode::SUCCESS;
    }
    let result = match &args.device_process {
        Some(config) => device::run(config).map_err(|error| error.to_string()),
        None => supervisor::run(&args).map(|()| Served::Well).map_err(|error| error.to_string()),
    };
    match result {
        Ok(Served::Well) => ExitCode::SUCCESS,
        Ok(Served::Unusable) => ExitCode::from(UNUSABLE),
        Err(sentence) => {
            eprintln!("vhost-user-kfd: {sentence}");
            ExitCode::FAILURE
        }
    }
}
