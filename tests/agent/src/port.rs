//! The virtio-serial port on which the host speaks.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::wire::PORT;

/// How long the kernel may take to show the port (drivers probe in the background).
const APPEAR: Duration = Duration::from_secs(30);

/// Opens the port.
///
/// # Errors
/// `NotFound` when no port of that name appears in time, or what opening it answers.
pub fn open() -> io::Result<File> {
    let start = Instant::now();
    loop {
        if let Some(path) = find() {
            return File::options().read(true).write(true).open(path);
        }
        if start.elapsed() > APPEAR {
            return Err(io::Error::new(
                io::ErrorKind::NotFound,
                format!("no virtio-serial port named {PORT}"),
            ));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The device of the port, found by the name that the host gave it (there is no udev here that would link it).
fn find() -> Option<PathBuf> {
    fs::read_dir("/sys/class/virtio-ports").ok()?.flatten().find_map(|entry| {
        let name = fs::read_to_string(entry.path().join("name")).ok()?;
        (name.trim() == PORT).then(|| PathBuf::from("/dev").join(entry.file_name()))
    })
}

/// Reads the port; where nobody is connected on the host's side the port reads as ended, and this waits instead.
#[derive(Debug)]
pub struct Patient(pub File);

impl Read for Patient {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.0.read(buffer) {
                Ok(0) if !buffer.is_empty() => std::thread::sleep(Duration::from_millis(20)),
                answer => return answer,
            }
        }
    }
}
