// memory SECTION...: runs sections of the suite in the order given.
#include "harness.h"

static const struct {
    const char *name;
    void (*run)(void);
} SECTIONS[] = {
    {"alloc", section_alloc},
    {"fixed", section_fixed},
    {"map", section_map},
    {"nodes", section_nodes},
    {"pointer", section_pointer},
    {"register", section_register},
    {"replaced", section_replaced},
    {"beyond-vram", section_beyond_vram},
    {"register-default", section_register_default},
    {"vmm", section_vmm},
    {"drm", section_drm},
    {"drm-file", section_drm_file},
    {"data", section_data},
    {"data-large", section_data_large},
    {"cases", section_cases},
    {"reopen", section_reopen},
    {"hotplug", section_hotplug},
    {"two", section_two},
    {"window", section_window},
    {"tiny-window", section_tiny_window},
    {"pids", section_pids},
    {"share", section_share},
    {"misc", section_misc},
};

int main(int count, char **arguments) {
    if (count > 1 && !strcmp(arguments[1], "two-child"))
        return two_child(count, arguments);
    if (count == 3 && !strcmp(arguments[1], "pids-child"))
        return pids_child(arguments);
    begin();
    meet();
    line("nodes %u, cpu %u, gpus %s", machine.nodes, machine.cpu, node_list(machine.gpus, machine.gpu));
    for (int number = 1; number < count; number++) {
        bool found = false;
        for (unsigned section = 0; section < sizeof SECTIONS / sizeof *SECTIONS; section++)
            if (!strcmp(SECTIONS[section].name, arguments[number])) {
                line("= %s", arguments[number]);
                SECTIONS[section].run();
                found = true;
            }
        if (!found)
            give_up("no section %s", arguments[number]);
    }
    end();
    return 0;
}
