//! Marketing names of GPUs, from libdrm's table, in the way of libdrm.

use std::fs;
use std::path::PathBuf;

/// libdrm's table.
const TABLE: &str = "/usr/share/libdrm/amdgpu.ids";

/// What libdrm calls a GPU that is not in its table.
const UNKNOWN: &str = "AMD Radeon Graphics";

/// The name of a GPU by PCI device and revision.
pub fn name(device: u32, revision: u32) -> String {
    let table = fs::read_to_string(table_path()).unwrap_or_default();
    look_up(&table, device, revision).unwrap_or(UNKNOWN).to_owned()
}

/// libdrm takes another table from this variable, but not for a program that has more rights than its caller.
fn table_path() -> PathBuf {
    let same_rights =
        nix::unistd::getuid() == nix::unistd::geteuid() && nix::unistd::getgid() == nix::unistd::getegid();
    let asked = std::env::var_os("AMDGPU_ASIC_ID_TABLE_PATH").filter(|_| same_rights);
    asked.map_or_else(|| TABLE.into(), PathBuf::from)
}

/// Lines are `device, revision, name` in hexadecimal, behind comments and one line with the version.
fn look_up(table: &str, device: u32, revision: u32) -> Option<&str> {
    let lines = table.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.skip(1).find_map(|line| {
        let mut parts = line.splitn(3, ',');
        let mut hex = || u32::from_str_radix(parts.next()?.trim(), 16).ok();
        let found = (hex()?, hex()?);
        let name = parts.next()?.trim_start();
        // strtok ends the name at the next comma.
        let name = name.split(',').next().unwrap_or(name);
        (found == (device, revision) && !name.is_empty()).then_some(name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    // The form of libdrm's amdgpu.ids, with entries of the file of libdrm 2.4.124.
    const IDS: &str = "# List of AMDGPU IDs\n#\n1.0.0\n\n66A1,\t02,\tAMD Instinct MI60 / MI50\n\
                       66A1,\t06,\tAMD Radeon Pro VII\n7300,\tC1,\tAMD FirePro (TM) S9300 x2\n";

    #[test]
    fn by_device_and_revision() {
        assert_eq!(look_up(IDS, 0x66a1, 2), Some("AMD Instinct MI60 / MI50"));
        assert_eq!(look_up(IDS, 0x66a1, 6), Some("AMD Radeon Pro VII"));
        assert_eq!(look_up(IDS, 0x7300, 0xc1), Some("AMD FirePro (TM) S9300 x2"));
        assert_eq!(look_up(IDS, 0x66a1, 7), None);
        assert_eq!(look_up("", 1, 1), None);
    }
}
