from workers.connection import Server


def test_commands_name_what_they_would_not_find_by_themselves() -> None:
    assert Server("host:1").everburn_options == " --address host:1"
    assert Server("host:1", "lab").everburn_options == " --address host:1 --namespace lab"
    assert Server("host:1", of_folder=True).everburn_options == ""
